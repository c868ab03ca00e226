"""From messages to token ids through the model's own tokenizer and chat template, and back."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mxq import files
from mxq.errors import UsageError


class ChatTemplate:
    """A model's tokenizer with its chat template in one thinking mode.

    ``sha256`` is the hash of the template's source. The thinking mode is always passed to the template, never left to
    its default: acceptance differs by a factor of three between the modes. ``knows_thinking`` says whether the
    template looks at the mode at all.
    """

    def __init__(self, path: Path, *, thinking: bool) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).strip().split("\n")[0]
            raise UsageError(f"{path}: cannot load the tokenizer ({reason})", "tokenizer.json must be there") from None
        template = self._tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        if not template:
            raise UsageError(f"{path} has no chat template", "put the model's chat_template.jinja there")
        self.thinking = thinking
        self.sha256 = files.sha256_text(template)
        self.knows_thinking = "enable_thinking" in template

    def encode(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Return the token ids of ``messages`` and of the header that makes the model answer."""
        ids: list[int] = self._tokenizer(self.text(messages), add_special_tokens=False)["input_ids"]
        return ids

    def text(self, messages: Sequence[tuple[str, str]]) -> str:
        """Return what :meth:`encode` makes tokens of."""
        try:
            text: str = self._tokenizer.apply_chat_template(
                [{"role": role, "content": content} for role, content in messages],
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=self.thinking,
            )
        except Exception as error:  # a template is a program: jinja2's errors, and whatever it divides by
            raise UsageError(f"the chat template refuses the messages: {error}", "see the model's template") from error
        return text

    def tokens(self, text: str) -> list[int]:
        """Return the token ids of a text that is no conversation, of any length."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ``token_ids``, special tokens left out."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text
