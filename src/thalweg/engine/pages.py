"""Page ids handed out and taken back. Page 0 is never handed out: its slots take what padding rows write."""


class OutOfPages(Exception):
    """A pool has fewer free pages than were asked for; nothing was taken."""


class PageAllocator:
    """Free ids 1 .. pages - 1 of one pool (none where pages is 0), the one freed last first."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._free = list(range(pages - 1, 0, -1))
        self._used: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return len(self._used)

    def take(self) -> int:
        """One page. Raises OutOfPages."""
        if not self._free:
            raise OutOfPages(f"all {self.used} pages are in use")
        page = self._free.pop()
        self._used.add(page)
        return page

    def give_back(self, page: int) -> None:
        """A page that `take` gave. Raises KeyError for any other, before anything changes."""
        self._used.remove(page)
        self._free.append(page)
