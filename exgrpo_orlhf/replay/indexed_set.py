"""A set that can be drawn from by position."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class IndexedSet:
    """A set of question ids that also knows its members by position: add, remove and draw by index are all O(1).

    The order is part of the state: a sampler draws by index, so a resumed run must see the same order.
    """

    def __init__(self, members: Iterable[str] = ()) -> None:
        self._members = list(members)
        self._position = {member: i for i, member in enumerate(self._members)}

    def add(self, member: str) -> None:
        if member not in self._position:
            self._position[member] = len(self._members)
            self._members.append(member)

    def remove(self, member: str) -> None:
        """Raises KeyError if absent. The last member takes the freed position."""
        position = self._position.pop(member)
        last = self._members.pop()
        if last != member:
            self._members[position] = last
            self._position[last] = position

    def __getitem__(self, position: int) -> str:
        return self._members[position]

    def __contains__(self, member: object) -> bool:
        return member in self._position

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)
