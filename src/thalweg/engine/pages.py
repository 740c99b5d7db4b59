"""Page ids handed out, shared and taken back. Page 0 is never handed out: its slots take what padding rows write."""


class OutOfPages(Exception):
    """A pool has no free page."""


class PageAllocator:
    """Ids 1 .. pages - 1 of one pool (none where pages is 0), the one freed last first; each with its number of owners."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._free = list(range(pages - 1, 0, -1))
        self._owners: dict[int, int] = {}
        self.most = 0
        """pages in use at once, at most, so far"""

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return len(self._owners)

    def take(self) -> int:
        """One page, owned once. Raises OutOfPages."""
        if not self._free:
            raise OutOfPages(f"all {self.used} pages are in use")
        page = self._free.pop()
        self._owners[page] = 1
        self.most = max(self.most, self.used)
        return page

    def share(self, page: int) -> None:
        """One more owner of a page in use."""
        self._owners[page] += 1

    def give_back(self, page: int) -> None:
        """One owner fewer; the last one frees the page."""
        self._owners[page] -= 1
        if self._owners[page] == 0:
            del self._owners[page]
            self._free.append(page)
