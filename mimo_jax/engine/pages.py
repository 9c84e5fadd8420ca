"""Which request owns which page of one pool. Ints only; the device obeys."""


class PagePool:
    """`pages` page ids of one pool. Page 0 is the null page and never handed out.

    A request first reserves as many pages as it can ever hold at once, which is what admission asks for, and then
    takes and returns pages within that: a request that was admitted never has to wait for memory.

        total = free + in use         reserved <= total, in use <= reserved
    """

    def __init__(self, pages: int) -> None:
        if pages < 1:
            raise ValueError(f"pages={pages}; at least the null page is needed")
        self.total = pages - 1
        self._free = list(range(pages - 1, 0, -1))  # the last is handed out first
        self._in_use: set[int] = set()
        self.reserved = 0

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def in_use(self) -> int:
        return len(self._in_use)

    def can_reserve(self, count: int) -> bool:
        return self.reserved + count <= self.total

    def reserve(self, count: int) -> None:
        if not self.can_reserve(count):
            raise RuntimeError(f"{count} pages reserved with {self.total - self.reserved} unreserved")
        self.reserved += count

    def unreserve(self, count: int) -> None:
        self.reserved -= count

    def take(self, count: int) -> list[int]:
        """`count` page ids; their contents are anybody's old keys and values."""
        if count > len(self._free):
            raise RuntimeError(f"{count} pages taken with {len(self._free)} free")
        pages = [self._free.pop() for _ in range(count)]
        self._in_use.update(pages)
        return pages

    def give_back(self, pages: list[int]) -> None:
        for page in pages:
            self._in_use.remove(page)  # a KeyError here is a page given back twice
        self._free.extend(pages)

    def check(self) -> None:
        """Raises AssertionError if a page was lost, doubled or handed out beyond the reservations."""
        assert len(self._free) + len(self._in_use) == self.total, "free + in use != total"
        assert not self._in_use & set(self._free), "a page is free and in use"
        assert 0 not in self._in_use, "the null page is in use"
        assert len(self._in_use) <= self.reserved <= self.total, "in use <= reserved <= total does not hold"
