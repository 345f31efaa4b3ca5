document.querySelectorAll("table[data-sortable]").forEach((table) => {
  const heads = [...table.tHead.rows[table.tHead.rows.length - 1].cells];
  const key = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.value === undefined ? cell.textContent : cell.dataset.value === "" ? NaN : +cell.dataset.value;
  };
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.append(...head.childNodes);
    button.title = "Sort by this column";
    head.append(button);
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") === "descending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const rows = [...table.tBodies[0].rows];
      rows.sort((a, b) => {
        const x = key(a, column), y = key(b, column);
        if (typeof x === "string") return (up ? 1 : -1) * y.localeCompare(x, undefined, { numeric: true });
        if (isNaN(x) || isNaN(y)) return isNaN(x) - isNaN(y);
        return (up ? 1 : -1) * (x - y);
      });
      table.tBodies[0].append(...rows);
    });
  });
});
