"""The command ``fedjax-pfl``: run, compare, partition, list, report."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.markup import escape

from fedjax_pfl.experiment import arguments
from fedjax_pfl.experiment.config import Config
from fedjax_pfl.experiment.console import (
    Display,
    comparison_table,
    dataset_table,
    make_console,
    results_table,
    speed_text,
    target_text,
    unseen_text,
)
from fedjax_pfl.experiment.errors import UserError, nearest
from fedjax_pfl.experiment.folder import create, refuse_file

PROG = "fedjax-pfl"
HELP = f"""usage: {PROG} COMMAND ...

Simulate personalized federated learning with all clients stacked on one accelerator.

  run ALGORITHM [OPTIONS]      run one algorithm and write a folder with its results and a report
  run --config FILE            repeat a run
  run --resume DIR             continue a run that was interrupted
  compare ALGORITHM[:KEY=VALUE,...] ... [OPTIONS]
                               run several on the same clients, initial model and cohorts; one report
  partition [OPTIONS]          show who gets which samples, without training; --out DIR saves it with its picture
  list algorithms|data|models|partitions
  report DIR ... [--out DIR]   write the report of finished runs again, or of several in one
  --version

{PROG} run --help shows the common options, {PROG} run ALGORITHM --help also the algorithm's own.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code. Errors are told in one line (``--debug`` shows the traceback)."""
    tokens = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        keep_programs()
    debug = "--debug" in tokens or bool(os.environ.get("FEDJAX_PFL_DEBUG"))
    try:
        return dispatch(tokens)
    except SystemExit as stop:  # a help text was printed
        return int(stop.code or 0)
    except BrokenPipeError:  # whoever read the output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return _fail("stopped", 130)
    except (ValueError, OSError, ArithmeticError) as error:
        if debug:
            raise
        return _fail(str(error), getattr(error, "code", 2 if isinstance(error, (ValueError, OSError)) else 1))


def keep_programs() -> None:
    """Keep compiled programs for the next run, unless JAX is told where (or, by an empty name, not to)."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        import jax

        from fedjax_pfl.data.sources.cache import cache_folder

        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "programs"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def dispatch(tokens: list[str]) -> int:
    """The command named by the first token."""
    commands: dict[str, Callable[[list[str]], int]] = {
        "run": run_command, "compare": compare_command, "partition": partition_command, "list": list_command,
        "report": report_command,
    }  # fmt: skip
    if not tokens or tokens[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0 if tokens else 2
    if tokens[0] == "--version":
        from fedjax_pfl import __version__

        print(f"{PROG} {__version__}")
        return 0
    if tokens[0] not in commands:
        raise UserError(f"unknown command {tokens[0]!r}{nearest(tokens[0], [*commands, '--version', '--help'])}")
    return commands[tokens[0]](tokens[1:])


def run_command(tokens: list[str]) -> int:
    """``run``: one algorithm, from options, a configuration file or an unfinished folder."""
    from fedjax_pfl.algorithms import get
    from fedjax_pfl.experiment import resuming, run, toml

    positional, options = arguments.split_positional(tokens)
    file, folder = arguments.value_of("config", options), arguments.value_of("resume", options)
    asks_help = "--help" in options or "-h" in options
    if file and folder:
        raise UserError("--resume continues with the folder's own configuration: leave out --config")
    base = None
    if not asks_help:
        base = toml.read(file) if file else resuming.stored_config(folder) if folder else None
    if base is not None:
        base = resuming.with_own_partition(base, folder or (file or Path()).parent)
    if not positional and base is None:
        return _run_help(options)
    name = get(positional[0]).name if positional else (base or Config()).algorithm
    if base is not None and name != base.algorithm:
        raise UserError(f"{folder or file} is a run of {base.algorithm}, not of {name}")
    if base is None:
        base = Config(name)
    entry = get(name)
    config, output = arguments.parse_run(entry, [*options, *positional[1:]], base, f"{PROG} run {name}")
    config.check()
    display, command = Display(), shlex.join([PROG, "run", *tokens])
    if folder:
        resuming.refuse_changes(base, config, folder, output.out)
        outcome = run.resume(folder, display=display, command=command, prepared=run.prepare(config))
    else:
        outcome = run.run_experiment(config, output.out, display=display, command=command)
    if any(outcome.summary["test"].values()):
        display.console.print(results_table(outcome.summary))
    if (by_data_set := dataset_table([(outcome.summary["algorithm"], outcome.summary)])) is not None:
        display.console.print(by_data_set)
    for text in filter(None, (target_text(outcome.summary), unseen_text(outcome.summary), speed_text(outcome.summary))):
        display.note(text, "")
    return _end(display, outcome.folder, [outcome.folder], outcome.code, command, "run", outcome.problem)


def compare_command(tokens: list[str]) -> int:
    """``compare``: several algorithms with the same common options."""
    from fedjax_pfl.experiment import compare

    specs, options = arguments.split_positional(tokens)
    file, folder = arguments.value_of("config", options), arguments.value_of("resume", options)
    stored, base = compare.read(file) if file else ([], Config())
    base, output = arguments.parse_common(
        options, base, f"{PROG} compare ALGORITHM[:KEY=VALUE,...] ...", "Run several algorithms on the same clients."
    )
    base.check()
    display, command = Display(), shlex.join([PROG, "compare", *tokens])
    if folder:
        if specs or base != Config() or file or output.out:
            raise UserError("--resume continues a comparison with its own entries and options: give nothing else")
        outcome = compare.resume_comparison(folder, display=display, command=command)
    else:
        outcome = compare.compare(specs or stored, base, output.out, display=display, command=command)
    display.console.print(comparison_table(outcome.rows))
    if (by_data_set := dataset_table(outcome.rows)) is not None:
        display.console.print(by_data_set)
    folders = [outcome.folder / name for name, _ in outcome.rows]
    return _end(display, outcome.folder, folders, outcome.code, command, "compare", None)


def partition_command(tokens: list[str]) -> int:
    """``partition``: who gets which samples."""
    from fedjax_pfl.experiment import dealt
    from fedjax_pfl.experiment.setup import load_data

    kind = arguments.PartitionCommand
    options = arguments.parse(kind, tokens, f"{PROG} partition", str(kind.__doc__), default=kind())
    if options.output.out is not None:
        refuse_file(options.output.out)
    config = Config(data=options.data, partition=options.partition)
    config.check()
    source, partition, _ = load_data(config)
    display = Display()
    display.console.print(dealt.table(source, partition))
    for line in dealt.summary(source, partition):
        display.note(line, "")
    for path in dealt.save(options.output.out, source, partition) if options.output.out else ():
        _show_path(display, path)
    return 0


def list_command(tokens: list[str]) -> int:
    """``list``: what there is to choose from."""
    from fedjax_pfl.experiment.listing import LISTS

    if tokens and tokens[0] in ("-h", "--help"):
        print(f"usage: {PROG} list {'|'.join(LISTS)}")
        return 0
    if len(tokens) != 1:
        raise UserError(f"list needs one of {', '.join(LISTS)}")
    if tokens[0] not in LISTS:
        raise UserError(f"there is no list of {tokens[0]!r}{nearest(tokens[0], LISTS)}")
    make_console().print(LISTS[tokens[0]]())
    return 0


def report_command(tokens: list[str]) -> int:
    """``report``: write a report from the folders of runs."""
    from fedjax_pfl.experiment import compare

    options = arguments.parse(arguments.ReportOptions, tokens, f"{PROG} report", str(arguments.ReportOptions.__doc__))
    if not options.folders:
        raise UserError("report needs the folder of a run: fedjax-pfl report DIR ...")
    if options.out is not None:
        refuse_file(options.out)
    folders = [run for folder in options.folders for run in compare.folders(folder)]
    from fedjax_pfl.experiment.report import write_report

    only = options.folders[0] if len(options.folders) == 1 else None
    out = options.out or only or create(None, "report")
    _show_path(Display(), write_report(folders, out, shlex.join([PROG, "report", *tokens])))
    return 0


def _run_help(options: list[str]) -> int:
    from fedjax_pfl.algorithms import registry

    names = ", ".join(registry())
    if "--help" not in options and "-h" not in options:
        raise UserError(f"run needs an algorithm: {names}")
    text = f"Run one algorithm: {names}. Its own options are shown by: {PROG} run ALGORITHM --help"
    arguments.parse(arguments.run_options(None), ["--help"], f"{PROG} run ALGORITHM", text)
    return 0


def _end(
    display: Display, folder: Path, runs: list[Path], code: int, command: str, name: str, problem: str | None
) -> int:
    """What comes after the results: how to continue, what went wrong, and as the last line the report."""
    from fedjax_pfl.experiment.report import write_report

    report = write_report(runs, folder, command) if runs else folder
    if code >= 128:
        display.warn(f"{problem or 'stopped'}; continue with")
        display.note(f"{PROG} {name} --resume {shlex.quote(str(folder))}", "bold")
    elif problem:
        _fail(problem, code)
    _show_path(display, report)
    return code


def _show_path(display: Display, path: Path) -> None:
    display.console.print(escape(str(path)), highlight=False, soft_wrap=True)


def _fail(message: str, code: int) -> int:
    make_console(stderr=True).print(f"[red]error: {escape(message)}[/red]", highlight=False, soft_wrap=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
