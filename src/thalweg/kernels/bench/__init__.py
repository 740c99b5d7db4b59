"""Times GPU operations against peers. A folder here is a benchmark; the files beside know none of them but for `verb.py`."""
