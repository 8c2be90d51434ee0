"""Text to token ids and back, with control tokens only where somebody asked for them.

In:  text, or the segments of a rendered prompt; token ids.
Out: token ids; text; the bytes of one token.
Three ways in, and they differ in which ids they can give:
  encode_plain          text that somebody else wrote (a message, a tool result): never an id of
                        the added vocabulary, whatever it spells.
  encode_segments       a rendered prompt: the ids of its `special` segments, plain text between.
  encode_with_specials  a raw prompt (/v1/completions, /tokenize), whose author writes the model's
                        own format by hand: the spelling of ANY added token gives that token's id,
                        as in transformers, so whoever may send raw prompts may send every control
                        token. Never pass it the words of a third person.
The guarantee of encode_plain: it uses a second tokenizer, built from the same file with the added
tokens taken out (tokenizer_files.py). Switching them off in the first one does not do: most
control tokens of DeepSeek are not flagged special, and the library keeps matching those.
Not here: incremental decoding (detokenize.py), chat formats (encodings/).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self

import msgspec
import tokenizers

from gnomon.errors import CheckpointError, RequestError
from gnomon.text.segments import Segment
from gnomon.text.tokenizer_files import (
    Document,
    TokenizerFiles,
    read_tokenizer_file,
    read_tokenizer_folder,
    without_added_tokens,
)


class Tokenizer:
    """A byte-level BPE tokenizer of a checkpoint. Holds no state but a cache of token bytes."""

    def __init__(self, files: TokenizerFiles) -> None:
        self._files = files
        plain = without_added_tokens(files.document, files.source)
        self._full = _build(files.document, files.source)
        self._plain = _build(plain, files.source)
        self._check_added_ids()
        ids = (*files.document["model"]["vocab"].values(), *files.added.values())
        self._vocab_size = max(ids, default=-1) + 1
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """From one tokenizer.json, which names no start and no end token."""
        return cls(read_tokenizer_file(Path(path)))

    @classmethod
    def from_folder(cls, folder: str | Path) -> Self:
        """From a model folder: tokenizer.json and the configs around it."""
        return cls(read_tokenizer_folder(Path(folder)))

    @property
    def source(self) -> str:
        """The path of tokenizer.json, for messages."""
        return self._files.source

    @property
    def chat_template(self) -> str | None:
        """The Jinja chat template of the folder, or None."""
        return self._files.chat_template

    @property
    def vocab_size(self) -> int:
        """One more than the largest id; ids without a token may lie below it."""
        return self._vocab_size

    @property
    def added_tokens(self) -> Mapping[str, int]:
        """Spelling to id of every added token: all that can be a `special` segment."""
        return self._files.added

    @property
    def skipped_ids(self) -> frozenset[int]:
        """The ids flagged special: what `skip_special_tokens` leaves out of decoded text."""
        return self._files.special

    @property
    def bos_id(self) -> int | None:
        """The token that starts a text, or None where the folder names none."""
        return None if self._files.bos is None else self._files.added[self._files.bos]

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokens that end generation by the folder's own account; may be empty."""
        return self._files.eos_ids

    def special_id(self, name: str) -> int:
        """The id of the added token that is spelt `name`; CheckpointError if there is none."""
        index = self._files.added.get(name)
        if index is None:
            raise CheckpointError(
                f"{self.source} has no added token {name!r}, which the chat encoding needs; "
                "use the tokenizer.json of the same checkpoint, or another chat encoding"
            )
        return index

    def encode_plain(self, text: str) -> list[int]:
        """Ids of ordinary text; none of them belongs to an added token."""
        return self._encode(self._plain, text, adds_specials=False)

    def encode_with_specials(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a raw prompt, in which every added token may be spelt out.

        `add_special_tokens` also adds what the checkpoint adds by itself: what its post-processor
        says, and the start token where tokenizer_config.json says add_bos_token and the text does
        not begin with it already.
        """
        ids = self._encode(self._full, text, adds_specials=add_special_tokens)
        start = self.bos_id
        if add_special_tokens and self._files.adds_bos and start is not None and ids[:1] != [start]:
            ids.insert(0, start)
        return ids

    def encode_segments(self, segments: Iterable[Segment]) -> list[int]:
        """Ids of a rendered prompt. Neighbouring text is encoded as one text."""
        ids: list[int] = []
        text: list[str] = []
        for segment in segments:
            if segment.kind == "text":
                text.append(segment.value)
                continue
            if text:
                ids.extend(self.encode_plain("".join(text)))
                text.clear()
            ids.append(self.special_id(segment.value))
        if text:
            ids.extend(self.encode_plain("".join(text)))
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """The text of ids. Ids without a token give nothing; broken UTF-8 gives U+FFFD.

        `skip_special_tokens` leaves out the tokens that are flagged special in tokenizer.json,
        as everywhere; DeepSeek flags few of its control tokens so.
        """
        skipped = self.skipped_ids if skip_special_tokens else frozenset()
        pieces = (self.token_bytes(index) for index in ids if index not in skipped)
        return b"".join(pieces).decode("utf-8", errors="replace")

    def token_bytes(self, index: int) -> bytes:
        """The bytes that a token stands for: what it adds to the text. b"" for an unused id."""
        known = self._bytes.get(index)
        if known is None:
            token = self.id_to_token(index)
            known = b"" if token is None else _to_bytes(token)
            self._bytes[index] = known
        return known

    def id_to_token(self, index: int) -> str | None:
        """The entry of the vocabulary, in the alphabet of byte-level BPE; None if unused."""
        return self._full.id_to_token(index) if 0 <= index < self._vocab_size else None

    def _check_added_ids(self) -> None:
        """The library numbers added tokens in order; a file with other ids means other tokens."""
        for name, index in self._files.added.items():
            known = self._full.token_to_id(name)
            if known != index:
                raise CheckpointError(
                    f"{self.source}: added token {name!r} has id {index} in the file, but the "
                    f"`tokenizers` library gives it {known}, because ids before it are missing; "
                    "restore the missing added tokens"
                )

    def _encode(
        self, tokenizer: tokenizers.Tokenizer, text: str, *, adds_specials: bool
    ) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as fault:
            raise RequestError(
                f"the text holds a lone surrogate, {text[fault.start]!a}, at character "
                f"{fault.start}: it is not Unicode text; send valid UTF-8",
                code="invalid_unicode",
            ) from fault
        # The batch call lets go of the GIL, so that a long prompt in a thread stops nobody else.
        [encoded] = tokenizer.encode_batch_fast([text], add_special_tokens=adds_specials)
        return list(encoded.ids)


def _build(document: Document, source: str) -> tokenizers.Tokenizer:
    """A tokenizer of the library that cuts and pads nothing."""
    try:
        built = tokenizers.Tokenizer.from_buffer(msgspec.json.encode(document))
    except Exception as fault:  # the library raises Exception itself
        raise CheckpointError(
            f"{source} is not accepted by the `tokenizers` library {tokenizers.__version__}: "
            f"{fault}; copy it again from the checkpoint, or update the library"
        ) from fault
    built.no_truncation()
    built.no_padding()
    return built


def _byte_alphabet() -> dict[str, int]:
    """Character to byte of byte-level BPE: printable bytes are themselves, others start at 256."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + place): byte for place, byte in enumerate(others)})
    return alphabet


_BYTE_OF = _byte_alphabet()


def _to_bytes(token: str) -> bytes:
    """A token written in the byte alphabet, or, as some added tokens are, in plain characters."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode("utf-8")
