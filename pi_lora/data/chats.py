"""Chats to token ids: rendered by the chat template of the model, with the turns of the assistant."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from jinja2 import TemplateError

from pi_lora.data.documents import NamedJson
from pi_lora.data.tokens import Labelled
from pi_lora.errors import DataError, first_line
from pi_lora.types import Json

# Names of ShareGPT's `from` for the roles of chat templates.
ROLES = {"human": "user", "gpt": "assistant"}
NO_CHATS_WARNING = (
    "the model has a chat template and the data no chats: a model tuned on raw text alone chats worse; "
    "add a source with column: messages, and data.keep_short: 0.1"
)


def messages_of(row_name: str, given: list[Any]) -> list[Json]:
    """Return messages with `role` and `content`; ShareGPT's messages with `from` and `value` are converted. Raise
    DataError that names the row if a message has neither form.
    """
    messages = []
    for message in given:
        if isinstance(message, dict) and "from" in message:
            sender = message["from"]
            message = {"role": ROLES.get(sender, sender), "content": message.get("value")}
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(
                f"{row_name}: holds a message without role and content; "
                "write {role: user, content: ...}, or {from: human, value: ...}"
            )
        messages.append(message)
    return messages


class ChatTemplate:
    """Encodes chats with the chat template of the model. The loss counts the tokens of the assistant's turns, with the
    token that ends a turn, or all tokens if `train_on_all`.
    """

    def __init__(self, tokenizer: Any, train_on_all: bool = False, special_tokens: bool = False) -> None:
        if tokenizer.chat_template is None:
            raise DataError(
                "data.source: the tokenizer of the model has no chat template, which chats need; "
                "tune a model that has one, or leave chats out"
            )
        self.tokenizer = tokenizer
        self.train_on_all = train_on_all
        self.special = [] if special_tokens else tokenizer.all_special_tokens

    @property
    def writes_bos(self) -> bool:
        """Whether a chat begins with BOS."""
        try:
            text = self._rendered([{"role": "user", "content": "a"}])
        except (TemplateError, TypeError, ValueError):
            return False
        return text.startswith(self.tokenizer.bos_token)

    def chats(self, rows: Iterable[NamedJson], longest: int, counts: Counter[str]) -> Iterator[tuple[str, Labelled]]:
        """Yield the chats of at most `longest` tokens by the names of their rows, and count the others by reason."""
        for row_name, row in rows:
            [messages] = row.values()
            chat = self.encode(messages_of(row_name, messages), longest)
            if isinstance(chat, str):
                counts[f"{chat} left out"] += 1
            else:
                yield row_name, chat

    def encode(self, messages: list[Json], longest: int) -> Labelled | str:
        """Return a chat of at most `longest` tokens, or the reason why the chat is left out."""
        for message in messages:
            content = str(message.get("content"))
            if any(token in content for token in self.special):
                return "chats with special tokens in a message"
        try:
            chat = self._encoded(messages)
        except (TemplateError, TypeError, ValueError) as error:
            return f"chats that the chat template refuses ({first_line(error)})"
        if len(chat.ids) > longest:
            return f"chats of over {longest:,} tokens"
        if not any(chat.loss_mask):
            return "chats without a turn of the assistant"
        return chat

    def _encoded(self, messages: list[Json]) -> Labelled:
        text = self._rendered(messages)
        turns = [(0, len(text))]
        if not self.train_on_all:
            turns = list(self._turns(messages, text))
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        loss_mask = []
        for start, _ in encoded["offset_mapping"]:
            in_turn = any(first <= start < end for first, end in turns)
            loss_mask.append(in_turn)
        return Labelled(encoded["input_ids"], loss_mask)

    def _rendered(self, messages: list[Json], prompt: bool = False) -> str:
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt))

    def _turns(self, messages: list[Json], text: str) -> Iterator[tuple[int, int]]:
        """Yield the start and end of the assistant's turns in the rendered `text`. A turn is the text that follows the
        prompt when the chat is rendered up to that turn.
        """
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            until = self._rendered(messages[: number + 1])
            before = until
            for add_generation_prompt in (True, False):
                prompt = self._rendered(messages[:number], add_generation_prompt)
                if until.startswith(prompt) and text.startswith(prompt):
                    before = prompt
                    break
            turn = until.removeprefix(before)
            start = len(before)
            # Some templates write more before the last turn than before others, as Qwen 3 an empty <think> block.
            while turn and not text.startswith(turn, start):
                turn = turn[1:]
            if not turn:
                raise TemplateError("earlier turns change with later ones")
            yield start, start + len(turn)
