"""Bytes of every cache format, as arithmetic without torch: what `plan` adds up and what the layouts allocate by.

All counts are in bytes, slots (one cached row) or tokens. The main cache of DeepSeek-V4 comes in three page sizes: a
logical page of 256 tokens owns one c4 page of 64 slots, one index page of 64 keys and one c128 page of 2 slots, and
window pages have 256 slots.
"""

LOGICAL_PAGE_TOKENS = 256
C4_RATIO = 4
C128_RATIO = 128
INDEX_PAGE_KEYS = 64

LATENT_DIM = 512
ROPE_DIM = 64
NOPE_DIM = LATENT_DIM - ROPE_DIM
INDEX_DIM = 128

# v4: 448 e4m3 and 64 bf16 a slot, then 7 ue8m0 scales and a pad byte a slot, in two blocks of a page.
V4_DATA_BYTES = NOPE_DIM + 2 * ROPE_DIM
V4_SCALE_GROUP = 64
V4_SCALE_BYTES = 8
V4_SLOT_BYTES = V4_DATA_BYTES + V4_SCALE_BYTES

# index_fp8: 128 e4m3 a key, then one fp32 scale a key, in two blocks of a page.
INDEX_FP8_SCALE_BYTES = 4
INDEX_FP8_KEY_BYTES = INDEX_DIM + INDEX_FP8_SCALE_BYTES

# v32: inline in the slot, 512 e4m3, 4 fp32 scales, 64 bf16.
V32_SCALE_GROUP = 128
V32_SLOT_BYTES = LATENT_DIM + 4 * (LATENT_DIM // V32_SCALE_GROUP) + 2 * ROPE_DIM

# mla_bf16: 512 latent and 64 rope channels, bf16.
MLA_DIM = LATENT_DIM + ROPE_DIM
MLA_BF16_SLOT_BYTES = 2 * MLA_DIM


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def v4_page_bytes(page_slots: int) -> int:
    """Stride of a packed v4 page of `page_slots` slots: data and scales, rounded up to a multiple of 576 B."""
    return round_up(page_slots * V4_SLOT_BYTES, V4_DATA_BYTES)


def index_fp8_page_bytes(page_keys: int = INDEX_PAGE_KEYS) -> int:
    """Bytes of a packed index_fp8 page."""
    return page_keys * INDEX_FP8_KEY_BYTES


def v32_page_bytes(page_slots: int) -> int:
    """Bytes of a packed v32 page."""
    return page_slots * V32_SLOT_BYTES


def mla_bf16_page_bytes(page_slots: int) -> int:
    """Bytes of a packed mla_bf16 page."""
    return page_slots * MLA_BF16_SLOT_BYTES


def exact_page_bytes(page_slots: int, width: int) -> int:
    """Bytes of a packed exact (float32) page of rows `width` channels wide."""
    return page_slots * width * 4


def pages_for(count: int, page_slots: int) -> int:
    """Pages that hold `count` slots; 0 for an empty row."""
    return -(-max(count, 0) // page_slots)
