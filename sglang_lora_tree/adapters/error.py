"""The one error of this room."""

from collections.abc import Iterable


class AdapterError(ValueError):
    """An adapter, or the base model it is meant for, cannot be served exactly.

    file: the file (or other source) at fault.  field: the config field or tensor names at fault.
    cause: what is wrong.  cure: what the user can do.  The message holds all four.
    """

    def __init__(self, file: object, field: str, cause: str, cure: str) -> None:
        super().__init__(f"{file}: {field}: {cause}. Cure: {cure}.")
        self.file = str(file)
        self.field = field
        self.cause = cause
        self.cure = cure

    def __reduce__(self) -> tuple[type["AdapterError"], tuple[str, str, str, str]]:
        # The default would call __init__ with the message alone, and the error crosses process borders.
        return AdapterError, (self.file, self.field, self.cause, self.cure)


def listing(items: Iterable[str], limit: int = 40) -> str:
    """The items, comma-separated; past `limit` of them only how many more there are (a file can hold thousands)."""
    items = list(items)
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more
