"""The sizes of the design, and the promise that they cost no import of torch."""

import subprocess
import sys

from thalweg.layouts import exact, index_fp8, mla_bf16, sizes, v4, v32


def test_sizes_are_those_of_the_design() -> None:
    assert (sizes.V4_DATA_BYTES, sizes.V4_SCALE_BYTES, sizes.V4_SLOT_BYTES) == (576, 8, 584)
    assert [sizes.v4_page_bytes(slots) for slots in (256, 64, 2)] == [149_760, 37_440, 1_728]
    assert (sizes.index_fp8_page_bytes(), sizes.INDEX_PAGE_KEYS) == (8_448, 64)
    assert (sizes.V32_SLOT_BYTES, sizes.v32_page_bytes(64)) == (656, 41_984)
    assert (sizes.MLA_BF16_SLOT_BYTES, sizes.mla_bf16_page_bytes(1)) == (1_152, 1_152)
    assert sizes.exact_page_bytes(256, 512) == 524_288
    # A logical page of 256 tokens: 64 entries of c4, 64 index keys, 2 entries of c128.
    assert sizes.LOGICAL_PAGE_TOKENS // sizes.C4_RATIO == sizes.INDEX_PAGE_KEYS
    assert sizes.LOGICAL_PAGE_TOKENS // sizes.C128_RATIO == 2


def test_what_is_allocated_is_what_the_sizes_say() -> None:
    for slots in (1, 2, 61, 64, 256):
        caches = {
            v4.allocate(3, slots): sizes.v4_page_bytes(slots),
            index_fp8.allocate(3, slots): sizes.index_fp8_page_bytes(slots),
            v32.allocate(3, slots): sizes.v32_page_bytes(slots),
            mla_bf16.allocate(3, slots): sizes.mla_bf16_page_bytes(slots),
            exact.allocate(3, slots, 96): sizes.exact_page_bytes(slots, 96),
        }
        for cache, page_bytes in caches.items():
            assert cache.untyped_storage().nbytes() == 3 * page_bytes
            assert cache.stride(0) * cache.element_size() == page_bytes


def test_pages_for_counts_whole_pages_and_none_for_an_empty_row() -> None:
    assert [sizes.pages_for(count, 64) for count in (-5, 0, 1, 64, 65, 128)] == [0, 0, 1, 1, 2, 2]


def test_sizes_import_no_torch_numpy_or_triton() -> None:
    program = "import sys, thalweg.layouts.sizes; print({'torch', 'numpy', 'triton'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
