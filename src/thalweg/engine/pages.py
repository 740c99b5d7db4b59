"""Page ids handed out and taken back. Page 0 is never handed out: its slots take what padding rows write."""


class OutOfPages(Exception):
    """A pool has fewer free pages than were asked for; nothing was taken."""


class PageAllocator:
    """Free ids 1 .. pages - 1 of one pool (none where pages is 0), the one freed last first."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._free = list(range(pages - 1, 0, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return max(self.pages - 1, 0) - len(self._free)

    def take(self) -> int:
        """One page. Raises OutOfPages."""
        if not self._free:
            raise OutOfPages(f"all {self.used} pages are in use")
        return self._free.pop()

    def give_back(self, page: int) -> None:
        assert 0 < page < self.pages and page not in self._free, page
        self._free.append(page)
