"""``with`` for whatever has a ``close()``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import TypeVar

Self = TypeVar("Self", bound="Closing")


class Closing(ABC):
    """Closes itself at the end of a ``with`` block, however it ends."""

    @abstractmethod
    def close(self) -> None:
        """Idempotent."""

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
