"""Chats to token ids: rendered by the chat template of the model, with the turns of the assistant."""

import json
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

from jinja2 import TemplateError

from pi_lora.data.sources import Table
from pi_lora.data.tokens import Labelled, added_prefix, check_offsets, prompt_ids, special_tokens_of
from pi_lora.errors import DataError, first_line
from pi_lora.types import Json

# Names of ShareGPT's `from` for the roles of chat templates.
ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}
# Roles of the results of tools.
RESULT_ROLES = ("tool", "function", "ipython")
# Some templates write any role, also a misspelled one.
CHAT_ROLES = ("system", "developer", "user", "assistant", *RESULT_ROLES)
# Keys by which OpenAI, axolotl and ms-swift mark a turn as not to be learned, with 0 or false.
MARKS = ("weight", "train", "training", "loss")
# What a chat says beside the content of its turns, in JSON, if it is not empty.
BESIDE_CONTENT = re.compile(r'"(tools|tool_calls|function_call)": (?!null|\[\]|"")')
# Names of the reasoning of a turn.
REASONING = ("reasoning_content", "reasoning", "thinking")
# What a template raises for a chat that it does not take.
REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError)
# An answer with and without a thought: the variables of templates, which ignore unknown ones.
WITH_THOUGHT: Json = {"enable_thinking": True, "thinking": True}
WITHOUT_THOUGHT: Json = dict.fromkeys(WITH_THOUGHT, False)
# What precedes a template for the same tokens on every day. transformers (5.23) takes no function as a variable.
SAME_DAY = """{% macro strftime_now(format) %}
{{- format.replace("%Y", "2026").replace("%m", "01").replace("%B", "January")
          .replace("%b", "Jan").replace("%d", "01") -}}
{% endmacro %}
"""
ANSWER = "An answer."
MASKED = "turns marked as not to be learned"
UNENDED = "answers that end without a special token: generation does not stop there"
MEDIA = ("image", "images", "videos", "audios")
NO_CHATS_WARNING = (
    "the model has a chat template and the data no chats: a model tuned on raw text alone chats worse; "
    "add a source with column: messages, and data.keep_short: 0.1"
)


def messages_of(row_name: str, given: list[Any]) -> list[Json]:
    """Return messages with `role` and `content`; ShareGPT's messages with `from` and `value` are converted. Raise
    DataError that names the row if a message has neither form.
    """
    messages = []
    for entry in given:
        message = dict(entry) if isinstance(entry, dict) else {}
        sender = message.get("from")
        if sender is not None:
            message |= {"role": ROLES.get(sender, sender), "content": message.get("value")}
        if not isinstance(message.get("role"), str):
            raise DataError(
                f"{row_name}: holds a message without role and content; "
                "write {role: user, content: ...}, or {from: human, value: ...}"
            )
        messages.append(message)
    return messages


def takes_parts(tokenizer: Any) -> bool:
    """Whether the chat template writes the content of a turn only if it is a list of parts, as those of SmolVLM and
    LLaVA.
    """
    writes_text = _writes(tokenizer, "a turn")
    return not writes_text and _writes(tokenizer, _part("a turn"))


def _writes(tokenizer: Any, content: Any) -> bool:
    turns = [{"role": "user", "content": content}]
    try:
        return "a turn" in rendered(tokenizer, turns)
    except REFUSALS:
        return False


def rendered(
    tokenizer: Any, messages: list[Json], *, chat_template: str | None = None, tools: Any = None, **options: Any
) -> str:
    """Return messages under the chat template, or the one of a name; a date is that of `SAME_DAY`."""
    template = SAME_DAY + tokenizer.get_chat_template(chat_template, tools)
    text: str = tokenizer.apply_chat_template(messages, chat_template=template, tools=tools, tokenize=False, **options)
    return text


def _part(text: str) -> list[Json]:
    return [{"type": "text", "text": text}]


def in_parts(messages: list[Json]) -> list[Json]:
    """Return messages with the text of each as a list of one part."""
    return [message | {"content": _part(message["content"])} for message in messages]


def chat_prompt(tokenizer: Any, text: str, beginning: str = "") -> str:
    """Return the prompt that asks `text` as the turn of a user, with the `beginning` of the answer. It is what the
    template writes before an answer: at the end an empty thought, if the template has one, in turns or in prompts
    alone. BOS is left out where the tokenizer adds it. Raise DataError if there is no template, or if it does not write
    both turns.
    """
    if tokenizer.chat_template is None:
        raise DataError("the model has no chat template")
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": ANSWER}]
    if takes_parts(tokenizer):
        turns = in_parts(turns)
    ahead = partial(rendered, tokenizer, turns[:1], add_generation_prompt=True)
    try:
        prompt, answered, _ = rendered(tokenizer, turns, **WITHOUT_THOUGHT).rpartition(ANSWER)
        without_thought = ahead(**WITHOUT_THOUGHT)
        has_choice = without_thought != ahead(**WITH_THOUGHT)
    except REFUSALS as error:
        raise DataError(f"the chat template refuses the turn of a user ({first_line(error)})") from None
    if not answered or text.strip() not in prompt:
        raise DataError("the chat template leaves out the turn of a user, or the answer")
    if has_choice and without_thought.startswith(prompt):  # Gemma 4, Hunyuan
        prompt = without_thought
    prompt = prompt.removeprefix("".join(tokenizer.convert_ids_to_tokens(added_prefix(tokenizer))))
    # A space at the end would be no part of the first word of the answer.
    return prompt + beginning if beginning else prompt.rstrip(" ")


def chat_prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of `chat_prompt`. A special token in `text` is text: a space is put into it."""
    for token in special_tokens_of(tokenizer):
        text = text.replace(token, f"{token[0]} {token[1:]}")
    ids: list[int] = prompt_ids(tokenizer, chat_prompt(tokenizer, text))
    return ids


def chat_problem(tokenizer: Any) -> str:
    """Return why a model cannot be asked in its chat template; an empty text if it can."""
    try:
        chat_prompt(tokenizer, "a turn")
    except DataError as problem:
        return str(problem)
    return ""


def template_tokens(tokenizer: Any) -> int:
    """Return the tokens that the chat template writes around a turn; 0 if the model cannot be asked in it."""
    return 0 if chat_problem(tokenizer) else len(chat_prompt_ids(tokenizer, ""))


def turn_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of the turn of a user, and of the beginning of the answer, as servers render them: thoughts are
    not turned off.
    """
    turns = [{"role": "user", "content": text}]
    if takes_parts(tokenizer):
        turns = in_parts(turns)
    ids: list[int] = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    return ids


class Unusable(ValueError):
    """The reason why a chat is left out."""


def is_masked(message: Json) -> bool:
    """Whether a turn is marked as not to be learned."""
    return any(message.get(mark, 1) == 0 for mark in MARKS)


class ChatTemplate:
    """Encodes chats with the chat template of the model. The loss counts the tokens of the assistant's turns, with the
    token that ends a turn, or all tokens if `train_on_all`. Chats of more than `longest` tokens are left out.
    """

    def __init__(
        self, tokenizer: Any, longest: int, *, train_on_all: bool = False, special_tokens: bool = False
    ) -> None:
        if tokenizer.chat_template is None:
            raise DataError(
                "data.source: the tokenizer of the model has no chat template, which chats need; "
                "tune a model that has one, or leave chats out"
            )
        check_offsets(tokenizer)
        self.tokenizer = tokenizer
        self.longest = longest
        self.takes_parts = takes_parts(tokenizer)
        self.train_on_all = train_on_all
        self.special = special_tokens_of(tokenizer)
        self.refused = () if special_tokens else self.special

    def writes(self, prefix: list[int]) -> bool:
        """Whether a chat begins with the tokens of `prefix`, such as BOS."""
        try:
            text = self._render([{"role": "user", "content": "a"}])
        except REFUSALS:
            return False
        return text.startswith("".join(self.tokenizer.convert_ids_to_tokens(prefix)))

    def _render(self, messages: list[Json], **options: Any) -> str:
        """Return messages, whose contents are texts, under the template."""
        given = in_parts(messages) if self.takes_parts else messages
        return rendered(self.tokenizer, given, **options)

    def rows(
        self, table: Table, counts: Counter[str], seed: int | None = None, *, held_out: bool = False
    ) -> Iterator[Labelled]:
        """Yield the chats of a table, in the order of `seed`; count the others by reason. No chats are held out."""
        column = table.source.column
        for row_name, row in table.read([column], seed):
            messages = messages_of(row_name, row[column])
            notes: list[str] = []
            try:
                chat = self._encoded(messages, row, notes)
                if len(chat.ids) > self.longest:
                    raise Unusable(f"of over {self.longest:,} tokens")
                if not any(chat.loss_mask):
                    raise Unusable("without a turn of the assistant to learn")
            except Unusable as reason:
                counts[f"chats {reason} left out"] += 1
            except REFUSALS as error:
                counts[f"chats that the chat template refuses ({first_line(error)}) left out"] += 1
            else:
                counts[MASKED] += sum(map(is_masked, messages))
                counts.update(notes)
                yield chat._replace(name=row_name)

    def _encoded(self, messages: list[Json], row: Json, notes: list[str]) -> Labelled:
        """Return a chat. The other columns of its `row` may be `system`, `tools` and `chat_template_kwargs`. Add what
        distinguishes answers from those at inference to `notes`.
        """
        if any(map(row.get, MEDIA)):
            raise Unusable("with images, videos or sound")
        if row.get("system"):
            messages = [{"role": "system", "content": row["system"]}, *messages]
        given: Json = {
            "messages": messages,
            "tools": _entries(row.get("tools")),
            "options": _parsed(row.get("chat_template_kwargs")),
        }
        written = json.dumps(given, ensure_ascii=False)
        if any(token in written for token in self.refused):
            raise Unusable("with special tokens in a message")
        given = json.loads(written, object_hook=_without_none)
        messages = given["messages"]
        tools = given.get("tools") or None
        options = given.get("options") or {}
        render: partial[str] = partial(self._render, tools=tools, **options)
        for message in messages:
            _normalize(message)
        text = render(messages)
        for key in BESIDE_CONTENT.findall(json.dumps([messages, {"tools": tools}])):
            if key not in self.tokenizer.get_chat_template(tools=tools):
                raise Unusable(f"with {key}, unknown to the chat template,")
        if "{'" in text and "{'" not in written:
            raise Unusable("with calls or tools that the chat template would write as Python text")
        _check_turns(messages, render)
        turns = [(0, len(text))]
        if not self.train_on_all:
            turns = list(_turns(messages, text, render, self.special, notes))
        elif any(map(is_masked, messages)):
            raise Unusable("with turns that are not to be learned, under loss: all")
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        # The first token of a turn may begin with the white space that ends the prompt.
        loss_mask = [
            any(start < end and first < stop for first, end in turns) for start, stop in encoded["offset_mapping"]
        ]
        return Labelled(encoded["input_ids"], loss_mask)


def _parsed(value: Any) -> Any:
    """Return a value that may be written as JSON; None for an empty text."""
    if isinstance(value, str):
        return json.loads(value.strip() or "null")
    return value


def _entries(value: Any) -> list[Any]:
    """Return tools or calls; the list, or each of its entries, may be written as JSON."""
    return list(map(_parsed, _parsed(value) or []))


def _without_none(fields: Json) -> Json:
    """Return the fields that are given: Arrow gives every message and tool the fields of all others."""
    return {key: value for key, value in fields.items() if value is not None}


def _text_of(message: Json) -> Any:
    """Return the content of a message as text: parts are joined, and other results of tools are written as JSON. Raise
    Unusable if a part is no text.
    """
    content = message.get("content", "")
    if isinstance(content, list) and all(isinstance(part, dict) and "type" in part for part in content):
        kinds = {part["type"] for part in content} - {"text"}
        if kinds:
            raise Unusable(f"with parts of type {min(kinds)}")
        return "".join(part["text"] for part in content)
    if message["role"] in RESULT_ROLES and not isinstance(content, str):
        return json.dumps(content, ensure_ascii=False)
    return content


def _normalize(message: Json) -> None:
    """Give a message content that is a text, and calls with arguments that are none, as templates expect."""
    message["content"] = _text_of(message)
    if message["role"] == "function_call":  # of LLaMA-Factory: the content is a call, or a list of calls
        calls = json.loads(message["content"])
        calls = calls if isinstance(calls, list) else [calls]
        tool_calls = [{"type": "function", "function": call} for call in calls]
        message |= {"role": "assistant", "content": "", "tool_calls": tool_calls}
    if message["role"] not in CHAT_ROLES:
        raise Unusable(f"with turns of the {message['role']}, which is no role,")
    calls = _entries(message.pop("tool_calls", None))
    if calls:  # else the key is left out: some templates refuse an empty list
        message["tool_calls"] = calls
        for call in calls:
            function = call.get("function", call)
            function["arguments"] = _parsed(function.get("arguments")) or {}
    is_empty = not (message["content"].strip() or calls or message.get("function_call"))
    if is_empty and message["role"] == "assistant" and not is_masked(message):
        raise Unusable("with an empty turn of the assistant")


def _check_turns(messages: list[Json], render: partial[str]) -> None:
    """Raise Unusable if the template leaves out the content of a turn, or the reasoning of the last turn that has one.
    Many leave out the reasoning of earlier turns.
    """
    marked = [message | {"content": message["content"] and f"turn {n}."} for n, message in enumerate(messages)]
    text = render(marked)
    for message in marked:
        if message["content"] not in text:
            raise Unusable(f"with turns of the {message['role']}, unknown to the chat template,")
    while marked:
        turn = marked.pop()
        reasoning = {key: "reason." for key in REASONING if turn.get(key)}
        name = next(iter(reasoning), "<think> in an answer")
        if turn["role"] == "assistant" and "</think>" in messages[len(marked)]["content"]:
            reasoning["content"] = "<think>reason.</think>turn."
        if reasoning:
            if "reason." not in render([*marked, turn | reasoning]):
                raise Unusable(f"with {name}, unknown to the chat template,")
            return


def _turns(
    messages: list[Json], text: str, render: partial[str], special: tuple[str, ...], notes: list[str]
) -> Iterator[tuple[int, int]]:
    """Yield the start and end of the assistant's turns in the rendered `text`. A turn is the text that follows the
    prompt when the chat is rendered up to that turn. A `special` token after it is part of a turn that ends with none.
    Add to `notes` what the prompt of a turn has at inference alone, such as an empty thought, and turns without an end.

    The training templates of TRL (1.16) are not used: of 34 templates that TRL knows, 7 get other text than the
    model's own template writes, such as empty thoughts in earlier turns; 13 more learn tokens of the prompt as well.
    """
    boundaries = ("\n", " ", *special)
    for number, message in enumerate(messages):
        if message["role"] != "assistant" or is_masked(message):
            continue
        rest = _after_content(messages, number, render)
        until = _after_content(messages[: number + 1], number, render)
        prompt = _prompt(messages[:number], render)
        start = min(_equal_characters(prompt, until), _equal_characters(prompt, rest))
        # Some prompts begin what earlier turns do not have, as Qwen 3.5 <think>, which begins like <tool_call>.
        while 0 < start < len(prompt) and not prompt.endswith(boundaries, 0, start):
            start -= 1
        turn = until[start:]
        following = rest[start:]
        unended = _without_end(turn, special)
        lengths = (_length_in(following, form) for form in (turn, unended, unended.rstrip()))
        length = next(filter(None, lengths), 0)
        if not length:
            raise TemplateError("earlier turns change with later ones")
        first = len(text) - len(rest) + start
        end = first + length
        # GLM ends a turn with the token of the next role, gpt-oss with another token than the last turn.
        if not text[first:end].rstrip().endswith(special):
            closing = next((token for token in special if text.startswith(token, end)), "")
            end += len(closing)
        if start < len(prompt):
            notes.append(f"answers without the {prompt[start:]!r} that precedes them at inference")
        if not text[first:end].rstrip().endswith(special):
            notes.append(UNENDED)
        yield first, end


def _prompt(messages: list[Json], render: partial[str]) -> str:
    """Return what follows the content of the last turn in the prompt for an answer to `messages`. Templates render no
    prompt without messages: two answers begin alike.
    """
    if messages:
        return _after_content(messages, len(messages), partial(render, add_generation_prompt=True))
    one = render([{"role": "assistant", "content": "a"}])
    other = render([{"role": "assistant", "content": "b"}])
    return one[: _equal_characters(one, other)]


def _after_content(messages: list[Json], number: int, render: partial[str]) -> str:
    """Return what follows the content of the turn before turn `number` in rendered messages. The text before it may
    change with later turns: some templates leave out the reasoning of all turns before the last question.
    """
    text = render(messages)
    if not number:
        return text
    turn = messages[number - 1]
    changed_turn = turn | {"content": turn["content"] + "#"}
    changed = render([*messages[: number - 1], changed_turn, *messages[number:]])
    length = _equal_characters(text[::-1], changed[::-1])
    return text[len(text) - length :]


def _equal_characters(text: str, other: str) -> int:
    """Return the number of characters with which two texts begin alike."""
    lengths = range(1, min(len(text), len(other)) + 1)
    return bisect_left(lengths, x=True, key=lambda length: not other.startswith(text[:length]))


def _length_in(text: str, turn: str) -> int:
    """Return the length of a turn where it begins a text; 0 if it does not. Some templates write more into the last
    turn than into others, as Qwen 3 an empty <think> block.

    >>> _length_in("<think></think>Five. And", "<think>So</think>Five."), _length_in("Five.", "Six.")
    (20, 0)
    """
    equal = _equal_characters(text, turn)
    for cut in range(equal, len(turn)):
        if text.startswith(turn[cut:], equal):
            return equal + len(turn) - cut
    return equal if equal == len(turn) else 0


def _without_end(turn: str, special: tuple[str, ...]) -> str:
    """Return a turn without the special tokens that end it, and without the white space after and between them."""
    stripped = turn.rstrip()
    for token in special:
        if stripped.endswith(token):
            return _without_end(stripped.removesuffix(token), special)
    return turn
