"""Writes tokenizer.json: byte level, id = byte value, then the special tokens.

python -m tools.tiny.make_tokenizer
"""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

TOKENIZER_PATH = Path(__file__).parent / "tokenizer.json"
SPECIAL = ("<|bos|>", "<|eos|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|mask|>")
VOCABULARY = 272


def byte_characters() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte value, in byte order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = (byte for byte in range(256) if byte not in printable)
    table = {byte: chr(byte) for byte in printable} | {byte: chr(256 + rank) for rank, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]


def build() -> Tokenizer:
    """A BPE without merges over the 256 byte characters, plus special and reserved tokens up to 272."""
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    reserved = [f"<|reserved_{number}|>" for number in range(256 + len(SPECIAL), VOCABULARY)]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (*SPECIAL, *reserved)])
    return tokenizer


if __name__ == "__main__":
    build().save(str(TOKENIZER_PATH))
