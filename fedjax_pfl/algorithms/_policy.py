"""The one policy that the methods with a choice to learn have in common: a number that is always the same."""


def fixed_number(method: str, what: str, number: str) -> float:
    """The number of ``fixed:NUMBER``, in 0..1.

    Raises:
        ValueError: it is none, or outside.
    """
    try:
        value = float(number)
    except ValueError as error:
        raise ValueError(
            f"{method}: policy: fixed needs a number, such as fixed:0.5 ({what}), found {number!r}"
        ) from error
    if not 0 <= value <= 1:
        raise ValueError(f"{method}: policy: {what} must lie in 0..1, found {value}")
    return value
