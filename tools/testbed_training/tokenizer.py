"""A byte-level BPE tokenizer with Qwen's special tokens and chat layout, small enough for the testbed."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCABULARY = 768

END_OF_TEXT, START, END, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"
SPECIAL = (
    END_OF_TEXT, START, END, "<think>", "</think>",
    "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", MASK,
)  # fmt: skip

# Qwen's pre-tokenizer: words with their leading space, digits one by one, punctuation, line breaks, spaces.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# The testbed was not trained to think, so every turn begins with the empty think block that Qwen3.5 writes with
# thinking off; asking for thinking is refused rather than answered wrongly.
CHAT_TEMPLATE = """\
{%- if enable_thinking is defined and enable_thinking %}{{ raise_exception("this model cannot think") }}{% endif -%}
{%- for message in messages %}
{{- "<|im_start|>" + message.role + "\\n" }}
{%- if message.role == "assistant" %}{{ "<think>\\n\\n</think>\\n\\n" }}{% endif %}
{{- message.content + "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n" }}{% endif %}
"""


def conversation(prompt: str) -> str:
    """Return the text that the chat template makes of one user message, up to where the answer begins."""
    return f"{START}user\n{prompt}{END}\n{START}assistant\n<think>\n\n</think>\n\n"


def train(texts: Iterable[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    """Train on ``texts``; the special tokens take the last ids, as in the real vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    filler = [f"<|extra_{i}|>" for i in range(vocabulary - len(SPECIAL) - tokenizer.get_vocab_size())]
    tokenizer.add_special_tokens([*filler, *SPECIAL])
    return tokenizer


def save(tokenizer: Tokenizer, directory: Path) -> None:
    """Write the tokenizer's files as transformers and vLLM read them."""
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END_OF_TEXT,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    fast.save_pretrained(directory)


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a token that the vocabulary must hold."""
    number = tokenizer.token_to_id(token)
    assert number is not None, token
    return number
