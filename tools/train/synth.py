"""Endless synthetic documents: in-context recall, JSON filling, lists, counting, tool calls.

Everything comes from a seeded ``random.Random``.  Names are split in two by a hash:
one sixteenth of all names is reserved for evaluation and never used for training, so
an evaluation item cannot have been seen.
"""

from __future__ import annotations

import json
import random
import string
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from chatml import Segment, render, tool_call, tools_system

FIRST_NAMES = (
    "Alice Bob Carla David Elena Farid Grace Hugo Ines Jonas Karin Leo Maria Nadia Oscar Paula Quentin Rosa "
    "Stefan Tara Ulrich Vera Walter Xenia Yusuf Zoe Amir Bianca Cedric Dalia Emil Fiona Gustav Hanna Igor Julia "
    "Kofi Lena Milo Nora Omar Petra Rafael Selma Theo Uma Viktor Wanda Yara Zeno Anton Berta Chen Doris Ewan "
    "Freya Gita Henrik Ivana Jamal Kenji Lucia Marek Nils Olga Pablo Ravi Sofia Tomas Ursula Vito Wei Yannis Zara"
).split()
CITIES = (
    "Paris Berlin Madrid Rome Vienna Prague Lisbon Dublin Oslo Helsinki Athens Warsaw Budapest Brussels Zurich "
    "Geneva Munich Hamburg Lyon Milan Turin Naples Porto Seville Valencia Krakow Riga Tallinn Vilnius Sofia "
    "Bucharest Belgrade Zagreb Cairo Nairobi Lagos Accra Tunis Dakar Tokyo Osaka Kyoto Seoul Beijing Shanghai "
    "Delhi Mumbai Chennai Bangkok Hanoi Manila Jakarta Sydney Perth Auckland Toronto Montreal Boston Chicago "
    "Denver Seattle Austin Dallas Phoenix Lima Bogota Quito Santiago Havana Kingston Reykjavik Bergen Ghent"
).split()
THINGS = (
    "tea coffee chess music painting apples oranges cherries bread cheese honey rain snow trains boats maps "
    "puzzles novels poems tennis football swimming running cycling hiking dancing singing cooking baking "
    "gardening roses tulips cats dogs horses birds stars clouds rivers mountains old films jazz opera pottery "
    "knitting archery fencing sailing skiing lemons olives walnuts almonds cinnamon pepper chocolate pancakes "
    "dumplings noodles soup mushrooms plums peaches grapes melons crosswords kites clocks coins stamps radios"
).split()
COLOURS = "red blue green yellow orange purple pink brown black white grey silver gold violet turquoise".split()
JOBS = (
    "baker teacher nurse pilot farmer painter lawyer plumber tailor sailor librarian gardener chemist writer "
    "dentist musician carpenter translator photographer driver waiter judge butcher"
).split()
ANIMALS = "cat dog horse parrot rabbit turtle goat hamster pony donkey".split()
ITEMS = (
    "lamp chair table clock mirror ladder kettle blanket basket bicycle camera piano violin hammer tent candle "
    "mug carpet shelf suitcase umbrella radio drum vase bench"
).split()
WORDS = (
    "house river stone paper window garden bottle engine button letter silver forest market bridge winter summer "
    "planet pocket ticket candle mirror dragon castle island signal number record object method module string "
    "buffer socket thread parser random folder binary vector matrix column filter server client branch commit"
).split()
PLAIN_FILLERS = (
    "The meeting was moved to Tuesday.",
    "It rained all morning.",
    "The printer on the second floor is out of paper.",
    "Nobody has found the missing umbrella yet.",
    "The train was late again.",
    "Lunch is served at noon.",
    "The report will be ready next week.",
    "Please close the windows in the evening.",
    "The old building is being painted.",
    "A new coffee machine has been ordered.",
    "The garden behind the office is open to everyone.",
    "The lift is being repaired.",
    "Parking is free on Sundays.",
    "The museum opens at ten.",
    "Some of the boxes have not been unpacked.",
    "The weather is expected to improve.",
    "The library has extended its hours.",
    "This page was last updated a month ago.",
    "There are no other changes to report.",
    "The phone rang twice and then stopped.",
)
ONSETS = "b c d f g h j k l m n p r s t v w z br dr gr kr tr st sh th pl".split()
VOWELS = "a e i o u a e i o ai ea ou".split()
CODAS = ["", "", "", "n", "r", "l", "s", "k", "m", "th", "nd", "x"]


def is_reserved(name: str) -> bool:
    """Return True if a name is kept for evaluation (never used in training)."""
    return zlib.crc32(name.encode()) % 16 == 0


@dataclass
class Note:
    """A fact: the sentence, a question about it and the value that answers it."""

    text: str
    question: str
    value: str
    kind: str
    name: str


class Synth:
    """A seeded generator of synthetic training documents and evaluation items."""

    def __init__(self, seed: int, fillers: list[str] | None = None, reserved: bool = False) -> None:
        self.rng = random.Random(seed)
        self.fillers = fillers or list(PLAIN_FILLERS)
        self.reserved = reserved

    # -- words -----------------------------------------------------------------

    def made_up(self, low: int = 2, high: int = 3) -> str:
        rng = self.rng
        count = rng.randint(low, high)
        word = "".join(rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(count)) + rng.choice(CODAS)
        return word

    def name(self) -> str:
        rng = self.rng
        while True:
            roll = rng.random()
            if roll < 0.3:
                name = rng.choice(FIRST_NAMES)
            elif roll < 0.42:
                name = f"{rng.choice(FIRST_NAMES)} {self.made_up().capitalize()}"
            else:
                name = self.made_up().capitalize()
            if is_reserved(name) == self.reserved:
                return name

    def names(self, count: int) -> list[str]:
        seen: dict[str, None] = {}
        while len(seen) < count:
            seen[self.name()] = None
        return list(seen)

    def digits(self, count: int) -> str:
        return "".join(self.rng.choice("0123456789") for _ in range(count))

    def city(self) -> str:
        rng = self.rng
        if rng.random() < 0.75:
            return rng.choice(CITIES)
        return self.made_up(1, 2).capitalize() + rng.choice(("ville", "burg", "ton", "grad", "port", "field"))

    def thing(self) -> str:
        rng = self.rng
        roll = rng.random()
        if roll < 0.7:
            return rng.choice(THINGS)
        if roll < 0.85:
            return f"{rng.choice(COLOURS)} {rng.choice(THINGS)}"
        return f"{rng.choice(THINGS)} and {rng.choice(THINGS)}"

    def filler(self) -> str:
        rng = self.rng
        return rng.choice(PLAIN_FILLERS) if rng.random() < 0.4 else rng.choice(self.fillers)

    # -- notes -----------------------------------------------------------------

    def note(self, name: str, kind: str) -> Note:
        rng = self.rng
        pick = rng.choice
        identifier = name.lower().replace(" ", "_")
        if kind == "code":
            value = self.digits(4)
            text, ask = f"The code of {name} is {value}.", f"What is the code of {name}?"
        elif kind == "lives":
            value = self.city()
            text, ask = f"{name} lives in {value}.", f"Where does {name} live?"
        elif kind == "likes":
            value = self.thing()
            text, ask = f"{name} likes {value}.", f"What does {name} like?"
        elif kind == "job":
            value = pick(JOBS)
            text, ask = f"{name} works as a {value}.", f"What is the job of {name}?"
        elif kind == "colour":
            value = pick(COLOURS)
            text, ask = f"The favourite colour of {name} is {value}.", f"What is the favourite colour of {name}?"
        elif kind == "phone":
            value = self.digits(3) + "-" + self.digits(4)
            text, ask = f"The phone number of {name} is {value}.", f"What is the phone number of {name}?"
        elif kind == "room":
            value = str(rng.randint(100, 999))
            text, ask = f"{name} sits in room {value}.", f"In which room does {name} sit?"
        elif kind == "born":
            value = str(rng.randint(1900, 2020))
            text, ask = f"{name} was born in {value}.", f"When was {name} born?"
        elif kind == "pet":
            value = pick(ANIMALS)
            text, ask = f"{name} has a {value}.", f"Which animal does {name} have?"
        elif kind == "owns":
            value = pick(ITEMS)
            text, ask = f"{name} owns the {value}.", f"What does {name} own?"
        elif kind == "password":
            value = "".join(pick(string.ascii_lowercase) for _ in range(rng.randint(4, 8)))
            text, ask = f"The password of {name} is {value}.", f"What is the password of {name}?"
        elif kind == "port":
            value = str(rng.randint(1000, 9999))
            text, ask = f"The server {identifier} runs on port {value}.", f"On which port does {identifier} run?"
        else:  # "returns"
            value = str(rng.randint(0, 999))
            text, ask = f"The function {identifier}() returns {value}.", f"What does {identifier}() return?"
        return Note(text, ask, value, kind, name)

    MAIN_KINDS = ("code", "lives", "likes")
    MORE_KINDS = ("job", "colour", "phone", "room", "born", "pet", "owns", "password", "port", "returns")

    def notes(self, count: int, main_only: bool = False) -> list[Note]:
        """``count`` notes; no two share both name and kind, so each question has one answer."""
        rng = self.rng
        kinds = list(self.MAIN_KINDS)
        if not main_only and rng.random() < 0.5:
            kinds = rng.sample(self.MAIN_KINDS + self.MORE_KINDS, rng.randint(1, 6))
        people = self.names(max(2, count if rng.random() < 0.5 else (count + 1) // 2))
        pairs = [(n, k) for n in people for k in kinds]
        rng.shuffle(pairs)
        chosen = pairs[:count]
        if len(chosen) < count:
            chosen += [(n, kinds[0]) for n in self.names(count * 3) if n not in people][: count - len(chosen)]
        notes = [self.note(n, k) for n, k in chosen]
        rng.shuffle(notes)
        return notes

    def ask_again(self, note: Note) -> str:
        """A question for a note, sometimes worded otherwise than in evaluation."""
        rng = self.rng
        if rng.random() < 0.8:
            return note.question
        body = note.question[0].lower() + note.question[1:]
        return rng.choice(
            (f"Tell me: {body}", f"Please answer: {body}", f"Can you say {body}", f"I forgot. {note.question}")
        )

    def layout(self, notes: list[Note], room: int) -> str:
        """Notes as one text: lines, bullets, running prose, or titled documents with fillers."""
        rng = self.rng
        style = rng.random()
        want_filler = rng.random() < 0.55
        lines: list[str] = []
        budget = room
        for note in notes:
            while want_filler and budget > 60 and rng.random() < 0.4:
                text = self.filler()
                budget -= len(text) // 3
                lines.append(text)
            lines.append(note.text)
        if style < 0.35:
            return "\n".join(lines)
        if style < 0.5:
            return "\n".join("- " + line for line in lines)
        if style < 0.65:
            return " ".join(lines)
        docs: list[str] = []
        at = 0
        while at < len(lines):
            step = rng.randint(1, 5)
            docs.append(" ".join(lines[at : at + step]))
            at += step
        if style < 0.8:
            return "\n\n".join(docs)
        if style < 0.93:
            return "\n\n".join(f"Document {i + 1}:\n{doc}" for i, doc in enumerate(docs))
        return "\n\n".join(f"# {self.made_up().capitalize()}\n{doc}" for doc in docs)

    # -- recall documents --------------------------------------------------------

    def recall(self, room: int) -> list[Segment]:
        """Notes and questions that only the notes can answer, at most about ``room`` tokens."""
        rng = self.rng
        limit = max(2, min(40 if room <= 1100 else 120, (room - 80) // 24))
        count = rng.randint(2, min(8, limit)) if rng.random() < 0.4 else rng.randint(2, limit)
        notes = self.notes(count)
        asked = [rng.choice(notes) for _ in range(rng.randint(1, max(2, min(16, count))))]
        used = 15 * count + 40 * len(asked)
        body = self.layout(notes, max(0, room - used - 60))
        learn = rng.random() < 0.25
        style = rng.random()
        if style < 0.35:
            head = rng.choice(("", "Notes:\n", "Read the notes.\n\n", "Facts:\n"))
            out: list[Segment] = [(head + body + "\n", learn)]
            for note in asked:
                out.append((f"\nQuestion: {self.ask_again(note)}\nAnswer:", learn))
                out.append((f" {note.value}\n", True))
            return out
        if style < 0.42:
            out = [(body + "\n\nIn short:", learn)]
            out += [(" " + note.text, True) for note in asked]
            return out
        short = rng.random() < 0.25
        suffix = " Answer with the value only." if short else ""
        turns: list[tuple[str, str]] = []
        first = self.ask_again(asked[0]) + suffix
        if style < 0.52:
            turns += [("system", rng.choice(("", "Notes:\n", "Use these notes:\n")) + body), ("user", first)]
        else:
            if rng.random() < 0.3:
                turns.append(("system", rng.choice(SYSTEMS)))
            lead = rng.choice(("", "", "Notes:\n", "Here are some notes.\n\n", "Use the following documents.\n\n"))
            turns.append(("user", f"{lead}{body}\n\n{first}"))
        think = None
        for index, note in enumerate(asked):
            if index:
                turns.append(("user", self.ask_again(note) + suffix))
            turns.append(("assistant", note.value if short else note.text))
        if rng.random() < 0.12:
            think = f"The question is about {asked[-1].name}. The notes say: {asked[-1].text}"
        return render(turns, learn_user=learn, think=think)

    def eval_item(self, count: int) -> dict[str, object]:
        """A held-out recall item with ``count`` notes of the three main kinds."""
        notes = self.notes(count, main_only=True)
        target = self.rng.choice(notes)
        return {
            "notes": [note.text for note in notes],
            "question": target.question,
            "answer": target.value,
            "answer_sentence": target.text,
            "n_notes": count,
        }

    # -- structured output and small skills -----------------------------------------

    def json_fill(self) -> list[Segment]:
        rng = self.rng
        people = self.names(rng.randint(1, 6))
        kinds = rng.sample(("code", "lives", "likes", "job", "colour", "room", "born", "pet"), rng.randint(1, 4))
        keys = {"lives": "city", "likes": "likes", "colour": "colour", "born": "year"}
        table = {p: [self.note(p, k) for k in kinds] for p in people}
        notes = [n for row in table.values() for n in row]
        rng.shuffle(notes)
        who = rng.sample(people, rng.randint(1, min(3, len(people))))
        with_name = rng.random() < 0.8

        def fields(person: str) -> dict[str, object]:
            row: dict[str, object] = {"name": person} if with_name else {}
            for note in table[person]:
                key = keys.get(note.kind, note.kind)
                number = note.kind in ("room", "born")
                row[key] = int(note.value) if number else note.value
            return row

        listed = ", ".join(f'"{k}"' for k in fields(who[0]))
        turns: list[tuple[str, str]] = []
        if rng.random() < 0.2:
            turns.append(("system", "You answer with JSON only."))
        body = self.layout(notes, 200)
        for index, person in enumerate(who):
            ask = rng.choice(
                (
                    f"Return a JSON object with the keys {listed} for {person}.",
                    f"Give me {person} as JSON with the fields {listed}.",
                    f"Fill a JSON object with {listed} about {person}.",
                )
            )
            turns.append(("user", f"{body}\n\n{ask}" if index == 0 else ask))
            indent = 2 if rng.random() < 0.15 else None
            turns.append(("assistant", json.dumps(fields(person), indent=indent, ensure_ascii=False)))
        return render(turns)

    def json_list(self) -> list[Segment]:
        rng = self.rng
        pool = rng.choice((THINGS, CITIES, COLOURS, WORDS, ITEMS))
        words = rng.sample(pool, rng.randint(2, 8))
        if rng.random() < 0.5:
            ask = f"Write these words as a JSON array: {', '.join(words)}"
            return render([("user", ask), ("assistant", json.dumps(words))])
        count = rng.randint(1, 5)
        pairs = {rng.choice(WORDS): rng.randint(0, 999) for _ in range(count)}
        ask = "Write this as a JSON object: " + ", ".join(f"{k} is {v}" for k, v in pairs.items())
        return render([("user", ask), ("assistant", json.dumps(pairs))])

    def lists(self) -> list[Segment]:
        rng = self.rng
        if rng.random() < 0.3:
            words = [self.made_up() for _ in range(rng.randint(2, 14))]
        else:
            words = rng.sample(rng.choice((THINGS, CITIES, WORDS, FIRST_NAMES)), rng.randint(2, 14))
        joined = ", ".join(words)
        roll = rng.random()
        if roll < 0.5:
            ask = rng.choice(("Repeat this list:", "Copy this list:", "Say this again:"))
            answer = joined
        elif roll < 0.65:
            ask, answer = "Write this list with one item per line:", "\n".join(words)
        elif roll < 0.8:
            ask, answer = "Number these items:", "\n".join(f"{i + 1}. {w}" for i, w in enumerate(words))
        elif roll < 0.9:
            words = words[:6]
            joined = ", ".join(words)
            ask, answer = "Reverse this list:", ", ".join(reversed(words))
        else:
            ask, answer = "Write a bullet list of:", "\n".join(f"- {w}" for w in words)
        if rng.random() < 0.15 and roll < 0.5:
            return [(f"{joined}\n{joined}\n{joined}\n", True)]
        return render([("user", f"{ask} {joined}"), ("assistant", answer)])

    def counting(self) -> list[Segment]:
        rng = self.rng
        roll = rng.random()
        if roll < 0.3:
            start = rng.randint(0, 120)
            stop = start + rng.randint(3, 25)
            ask, answer = f"Count from {start} to {stop}.", ", ".join(map(str, range(start, stop + 1)))
        elif roll < 0.4:
            start = rng.randint(5, 60)
            stop = max(0, start - rng.randint(3, 20))
            ask, answer = f"Count down from {start} to {stop}.", ", ".join(map(str, range(start, stop - 1, -1)))
        elif roll < 0.55:
            step, start = rng.randint(1, 10), rng.randint(0, 30)
            row = [start + step * i for i in range(rng.randint(10, 14))]
            ask = "Continue: " + ", ".join(map(str, row[:5]))
            answer = ", ".join(map(str, row[5:]))
        elif roll < 0.65:
            ask, answer = "Write the alphabet.", " ".join(string.ascii_lowercase)
        elif roll < 0.75:
            at = rng.randrange(25)
            letter = string.ascii_uppercase[at]
            ask, answer = f"Which letter comes after {letter}?", string.ascii_uppercase[at + 1]
        elif roll < 0.88:
            a, b = rng.randint(0, 50), rng.randint(0, 50)
            ask, answer = f"What is {a} + {b}?", f"{a} + {b} = {a + b}"
        else:
            word = rng.choice(WORDS)
            ask, answer = f"Spell the word {word}.", "-".join(word.upper())
        return render([("user", ask), ("assistant", answer)])

    def tools(self) -> list[Segment]:
        rng = self.rng
        chosen = rng.sample(sorted(TOOLS), rng.randint(1, min(4, len(TOOLS))))
        system = tools_system([TOOLS[name] for name in chosen], rng.choice((None, None, SYSTEMS[0])))
        turns: list[tuple[str, str]] = [("system", system)]
        for _ in range(rng.randint(1, 2)):
            tool = rng.choice(chosen)
            person, city = self.name(), self.city()
            a, b = rng.randint(0, 99), rng.randint(0, 99)
            args: dict[str, object]
            result: dict[str, object]
            if tool == "get_weather":
                degrees = rng.randint(-10, 38)
                ask, args = f"What is the weather in {city}?", {"city": city}
                result, answer = {"temperature": degrees}, f"It is {degrees} degrees in {city}."
            elif tool == "get_time":
                clock = f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
                ask, args = f"What time is it in {city}?", {"city": city}
                result, answer = {"time": clock}, f"It is {clock} in {city}."
            elif tool == "lookup_code":
                code = self.digits(4)
                ask, args = f"Look up the code of {person}.", {"name": person}
                result, answer = {"code": code}, f"The code of {person} is {code}."
            elif tool == "add":
                ask, args = f"Add {a} and {b}.", {"a": a, "b": b}
                result, answer = {"sum": a + b}, f"The sum of {a} and {b} is {a + b}."
            else:
                word = rng.choice(WORDS)
                ask, args = f"Search the documents for {word}.", {"query": word}
                result, answer = {"hits": a}, f"The search for {word} gave {a} hits."
            turns += [
                ("user", ask),
                ("assistant", tool_call(tool, args)),
                ("tool", json.dumps(result)),
                ("assistant", answer),
            ]
        return render(turns)

    def small_talk(self) -> list[Segment]:
        rng = self.rng
        turns: list[tuple[str, str]] = [("system", rng.choice(SYSTEMS))] if rng.random() < 0.3 else []
        for ask, answer in rng.sample(SMALL_TALK, rng.randint(1, 3)):
            turns += [("user", rng.choice(ask)), ("assistant", answer)]
        return render(turns)

    def misc(self, room: int) -> list[Segment]:
        """A document of the small skills."""
        table: list[tuple[float, Callable[[], list[Segment]]]] = [
            (0.40, self.json_fill),
            (0.08, self.json_list),
            (0.20, self.lists),
            (0.12, self.counting),
            (0.14, self.tools),
            (0.06, self.small_talk),
        ]
        roll = self.rng.random()
        for share, make in table:
            roll -= share
            if roll < 0:
                return make()
        return self.json_fill()


SYSTEMS = (
    "You are a helpful assistant.",
    "Answer briefly.",
    "You answer questions about the given notes.",
    "You are quire-tiny, a small language model.",
    "You help with Python.",
)
SMALL_TALK: list[tuple[tuple[str, ...], str]] = [
    (("Hello!", "Hi", "Hello", "Hey there", "Good morning"), "Hello! How can I help you?"),
    (
        ("Who are you?", "What are you?", "What is your name?", "Tell me about yourself."),
        "I am quire-tiny, a very small language model for demos and tests. I was trained on the Python documentation.",
    ),
    (("Thank you.", "Thanks!", "Thanks a lot"), "You are welcome."),
    (
        ("What can you do?", "How can you help me?", "Help"),
        "I can answer simple questions about Python and about notes that you give me. "
        "I am very small, so check what I say.",
    ),
    (("How are you?", "How do you do?"), "I am fine, thank you. What would you like to know?"),
    (("Bye", "Goodbye!", "See you"), "Goodbye!"),
]


def _tool(name: str, description: str, /, **properties: str) -> dict[str, object]:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind} for key, kind in properties.items()},
                "required": list(properties),
            },
        },
    }


TOOLS: dict[str, dict[str, object]] = {
    "get_weather": _tool("get_weather", "Current weather of a city", city="string"),
    "get_time": _tool("get_time", "Local time of a city", city="string"),
    "lookup_code": _tool("lookup_code", "The code of a person", name="string"),
    "add": _tool("add", "Add two numbers", a="integer", b="integer"),
    "search": _tool("search", "Search the documents", query="string"),
}
