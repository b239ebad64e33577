"""Chats that a model writes itself from short prompts, as data against forgetting: `data.source: {column: messages}`.

    python scripts/make_chats.py models/smollm2_135m_instruct chats.jsonl [--chats 500] [--seed 0]

No outside data is needed: prompts are made from lists of tasks and topics, and every answer is sampled from the model.
A chat has one or two questions. Each line is a chat; the same command continues a file that was not finished.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from tqdm import tqdm

import pi_lora
from arguments import parser_of
from pi_lora.types import Json

TASKS = """\
Explain {topic} to a child.
What is {topic}?
Write a short poem about {topic}.
List five facts about {topic}.
Why does {topic} matter?
Write a short story about {topic}.
What are common mistakes about {topic}?
How would you begin to learn about {topic}?
Compare {topic} with {other}.
Write a polite letter that asks for help with {topic}.
Give me three questions for a quiz about {topic}, with answers.
Summarize what is known about {topic} in two sentences.
""".splitlines()
TOPICS = (
    "rain,the moon,bread,money,chess,bees,music,sleep,the sea,mathematics,bridges,poetry,trains,salt,history,computers,"
    "gardens,volcanoes,friendship,cooking,maps,light,trees,the human heart,painting,languages,clocks,glass,football,"
    "electricity,horses,coffee,democracy,dreams,paper,rivers,medicine,fear,the telephone,winter,atoms,wool,law,cities,"
    "birds,numbers,travel,water,recycling,dinosaurs,philosophy,vaccines,steel,libraries,jokes,deserts,rockets,soil"
).split(",")
FOLLOW_UPS = """\
Can you say that more simply?
Give me an example.
What else should I know?
Why is that?
Say it in one sentence.
Are you sure? Explain.
""".splitlines()
# Questions of a chat, tokens of an answer, and chats that are answered at once.
TURNS = 2
LONGEST = 256
BATCH = 16


def questions(number: int, seed: int) -> list[str]:
    """Return the questions of chat `number`, which follow from number and seed alone."""
    rng = random.Random(f"{seed} {number}")
    topic, other = rng.sample(TOPICS, 2)
    first = rng.choice(TASKS).format(topic=topic, other=other)
    return [first, *rng.sample(FOLLOW_UPS, rng.randrange(TURNS))]


def answer(model: pi_lora.LoadedModel, chats: Sequence[list[Json]], seed: int) -> list[str]:
    """Return the model's next turn of each chat, sampled."""
    transformers.set_seed(seed)
    tokenizer = model.tokenizer
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    inputs = tokenizer.apply_chat_template(
        chats,
        add_generation_prompt=True,
        padding=True,
        return_tensors="pt",
        return_dict=True,
    ).to(model.module.device)
    with torch.inference_mode():
        ids = model.module.generate(
            **inputs,
            max_new_tokens=LONGEST,
            do_sample=True,
            temperature=0.7,
            top_p=0.95,
            pad_token_id=tokenizer.pad_token_id,
        )
    _, prompt_tokens = inputs["input_ids"].shape
    texts = tokenizer.batch_decode(ids[:, prompt_tokens:], skip_special_tokens=True)
    return [text.strip() for text in texts]


def answered(model: pi_lora.LoadedModel, asks: list[list[str]], seed: int) -> list[list[Json]]:
    """Return the chats in which the model answers these questions, turn by turn."""
    chats: list[list[Json]] = [[] for _ in asks]
    for turn in range(max(map(len, asks))):
        talking = []
        for chat, questions_of_chat in zip(chats, asks, strict=True):
            if turn < len(questions_of_chat):
                chat.append({"role": "user", "content": questions_of_chat[turn]})
                talking.append(chat)
        replies = answer(model, talking, seed + turn)
        for chat, reply in zip(talking, replies, strict=True):
            chat.append({"role": "assistant", "content": reply})
    return chats


def main() -> None:
    """Append chats to the file until it has as many as asked for."""
    parser = parser_of(__doc__)
    parser.add_argument("model")
    parser.add_argument("output", type=Path)
    parser.add_argument("--chats", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    asked.output.parent.mkdir(parents=True, exist_ok=True)
    # A line that a kill cut off is written again.
    written = asked.output.read_text(encoding="utf-8") if asked.output.exists() else ""
    whole = written[: written.rfind("\n") + 1]
    asked.output.write_text(whole, encoding="utf-8")
    done = whole.count("\n")
    model = pi_lora.load(asked.model)
    with asked.output.open("a", encoding="utf-8") as file, tqdm(total=asked.chats, initial=done) as bar:
        for start in range(done, asked.chats, BATCH):
            numbers = range(start, min(start + BATCH, asked.chats))
            asks = [questions(number, asked.seed) for number in numbers]
            chats = answered(model, asks, asked.seed + start)
            file.writelines(json.dumps({"messages": chat}, ensure_ascii=False) + "\n" for chat in chats)
            file.flush()
            bar.update(len(chats))


if __name__ == "__main__":
    main()
