"""Wordings of facts and questions: a grammar with too many sentences to be learnt by heart.

In:  a random.Random.
Out: templates with {key}, {noun} and {value} in them; the value is the first number after the key.
     The held-out wordings share their telling words with no training template.
Few wordings teach a model those wordings: with 20 of them recall of held-out ones was 50 % where
that of known ones was 94 %. Stray numbers and stray words, on the other hand, teach it to be vague.
"""

from __future__ import annotations

import random

from training.data.documentation import phrase
from training.data.words import QUALITIES, WEEKDAYS, pseudo_word

NOUNS = (
    "number", "number", "number", "code", "secret number", "magic number", "value", "pin",
    "access code", "phone number", "ticket number", "score", "price", "count", "password",
    "serial number", "total", "locker number", "room number", "id", "amount", "answer", "result",
    "size", "weight", "age", "account number", "reference", "combination", "serial", "entry",
)  # fmt: skip
HELD_OUT_NOUNS = ("number", "badge number", "key", "figure")
HELD_OUT_STATEMENTS = (
    "Whoever asks about {key} should hear the {noun} {value}.",
    "Keep this to yourself: the {noun} for {key} is {value}.",
    "It is well known that {key} carries the {noun} {value}.",
    "According to the list, the {noun} for {key} is {value}.",
)
HELD_OUT_QUESTIONS = (
    "What is the number for {key}?",
    "From the text: which {noun} does {key} have?",
    "What was the {noun} for {key} again?",
    "Do you know the {noun} of {key}?",
)
_VERBS = (
    "is", "is", "was", "has", "has", "had", "got", "holds", "keeps", "owns", "uses", "means",
    "equals", "shows", "gives", "took", "wrote", "says", "reads", "bears", "received", "chose",
    "picked", "remembers", "goes with", "comes with", "stands for", "is linked to", "is tied to",
    "points to", "maps to", "is listed with", "was given", "was assigned", "is marked with",
    "ended up with", "answers to", "will be", "can be found at", "lives at", "costs", "weighs",
    "scored", "opens with", "starts with", "is worth", "asked for", "now has",
)  # fmt: skip
_PREPOSITIONS = (
    "for", "for", "for", "of", "of", "on", "by", "with", "at", "from", "that belongs to",
    "used by", "given to", "kept by", "next to", "behind", "of our", "of the", "in", "to enter",
    "assigned to", "written on", "known to", "we gave to", "which you need for",
)  # fmt: skip
_DETERMINERS = ("the", "the", "a", "its", "their", "this", "our", "another", "his", "her")
_BEFORE = (
    "Remember that ", "Note: ", "As of today, ", "In the end, ", "For the record, ",
    "By the way, ", "On {weekday}, ", "We know that ", "Do not forget: ", "Important: ",
    "It turned out that ", "P.S. ", "> ", "* ", "- ", "Please keep in mind that ", "Also, ",
    "Later, ", "So ", "If you need it, ", "Reminder: ", "{weekday}: ", "# ", "Today ", "fact: ",
    "I read that ", "then ", "Listen: ", "They told me that ", "In short, ", "First, ",
)  # fmt: skip
_AFTER = (
    ".", ".", ".", ".", ".", "", "", "!", ";", ", they say.", " and nothing else.",
    " (see above).", ", as far as we know.", " since {weekday}.", " today.", ",", " by now.", "...",
)  # fmt: skip
_MARKS = (
    ": ", ": ", ":", " = ", "=", " -> ", " => ", " | ", ", ", " - ", " :: ", " ... ", "\t", " ",
    " / ", " := ", " --> ", ": \"", "; ", " ~ ",
)  # fmt: skip
_SHAPES = (
    "{key} ({noun}){mark}{value}", "{key} [{noun}] {value}", '"{key}": {value},',
    "{noun}[{key}] = {value}", "{noun}.{key}={value}", "set {key} to {value}",
    "{key}, whose {noun} {verb} {value},", "<{key}>{value}", "| {key} | {noun} | {value} |",
    "{noun} {key} {value}", "We gave {key} the {noun} {value}", "{key}'s {noun} is {value}",
    "If you look for {key}, you will find the {noun} {value}",
    "On the card of {key} it says {value}",
    "For {key}, the {noun} {verb} {value}", "{noun} {prep} {key}{mark}{value}",
    "{key}{mark}{noun} {value}", "there is {key} and its {noun} {value}",
    "you should call {key} under {value}", "with {key} one gets {value}",
)  # fmt: skip
# Clauses: words that look after the key before the number comes.
_WHO = (
    "who", "people who", "those who", "the man who", "a woman who", "if they",
    "when you", "before you", "the guests that", "if somebody", "all of you who", "once we",
    "the clerk who", "to those who", "because she", "while they", "no one who", "a friend that",
)  # fmt: skip
_LOOKS = (
    "wants", "want", "look for", "visit", "likes", "opens", "writes to", "calls",
    "works with", "speaks of", "meets", "order", "takes care of", "mentions", "would like to see",
    "has lost", "came for", "is waiting for", "enter", "travels with", "remember",
)  # fmt: skip
_THEN = (
    "gets", "must type", "can use", "will find", "has been told", "may write",
    "takes along", "also brings", "types in", "says", "reads out",
    "finds on the door", "cannot do without", "had better keep", "will soon see", "goes by",
    "should never forget", "receives by post", "is allowed to see", "pays with", "hands over",
)  # fmt: skip
# Words of more than one form: "{key} was also told to bring the code 4711".
_MAY = (
    "may", "can", "must", "should", "did", "does", "could", "might", "shall", "will",
    "is going to", "was told to", "used to", "wants to", "promised to", "decided to", "had better",
    "has agreed to", "is bound to", "never fails to", "is asked to", "was able to", "likes to",
)  # fmt: skip
_HOW = ("", "", "", "", "also ", "now ", "always ", "only ", "soon ", "still ", "often ", "just ")
_DO = (
    "use", "carry", "show", "bring", "take", "type", "give", "have", "hold", "read", "write",
    "present", "enter", "remember", "call", "state", "quote", "name", "hand over", "begin with",
    "open with", "answer with", "send", "hide", "accept", "receive", "mention", "copy", "want",
    "start from", "show up with", "be known by", "be filed under", "be found under", "get",
)  # fmt: skip
_FRAMES = (
    "in the {where}, {key} {verb} the {noun} {value}", "{key}: its {noun} {verb} {value}",
    "in the {where} {key} has the {noun} {value}", "about {key}: {noun} {value}",
    "the {where} says that {key} {verb} the {noun} {value}", "nobody but {key} has {value}",
    "the {noun} that stands {prep} {key} {verb} {value}", "next comes {key} with {value}",
    "the {where} has {key} under {value}", "the {noun} {prep} {key}, by the {where}, is {value}",
    "{key} can be reached by the {noun} {value}", "speaking of {key}, {value} is the {noun}",
    "the {noun} of what we call {key} {verb} {value}", "all of {key} is kept under {value}",
    "those of {key} got the {noun} {value}", "what {key} needs is the {noun} {value}",
    "{where}, {key}: {value}", "look, {key}! the {noun} {verb} {value}",
)  # fmt: skip
_WHERES = (
    "book", "notebook", "table", "letter", "first column", "catalogue", "ledger", "index",
    "directory", "old file", "report", "diary", "cellar", "log", "lower row", "plan", "archive",
)  # fmt: skip
_ASK = (
    "What is the {noun} {prep} {key}?", "What is the {noun} {prep} {key}?",
    "What is the {noun} for {key}?", "What is {key}'s {noun}?", "Which {noun} belongs to {key}?",
    "Which {noun} {verb} {key}?", "What {noun} was it for {key}?", "Tell me the {noun} for {key}.",
    "Give me the {noun} {prep} {key}.", "Find the {noun} of {key}.", "{key}?", "And {key}?",
    "{noun} {prep} {key}?", "I forgot the {noun} {prep} {key}. What was it?",
    "What did it say about {key}?", "What number goes with {key}?", "How about {key}?",
    "Can you find {key} in the text and tell me its {noun}?", "{key} {verb} what?",
    "Do you remember the {noun} {prep} {key}?", "The {noun} {prep} {key}, please.",
    "Look up {key}.", "Which one was {key}?", "Say the {noun} of {key}.",
    "I am looking for the {noun} {prep} {key}.", "Search for {key}. What is its {noun}?",
    "Where it mentions {key}, what is the {noun}?", "What do you know about {key}?",
    "Which {noun} was it that {key} had?", "What {noun} did {key} get?",
    "Name the {noun} of {key}.",
    "{key} has which {noun}?", "Do the notes name a {noun} for {key}?", "{noun}, {key}?",
    "Under which {noun} is {key} known?", "Somebody asks for {key}. What should I say?",
    "What stood beside {key}?", "Repeat the {noun} {prep} {key}.", "Quote the {noun} for {key}.",
    "Which {noun} did they write down for {key}?", "What {noun} do the notes have for {key}?",
    "Kindly tell me what {noun} there was for {key}.", "Could you check the {noun} of {key}?",
    "By what I wrote, what is the {noun} of {key}?", "Which {noun} must be used for {key}?",
)  # fmt: skip
_ASK_DO = (
    "{w} {{noun}} {a} {{key}} {d}?", "{w} {{noun}} {a} {{key}} {d}?",
    "{w} {a} {{key}} {d}?", "{w} {{noun}} was it that {{key}} {a} {d}?",
    "with {w} {{noun}} {a} {{key}} {d}?", "{w} is the {{noun}} that {{key}} {a} {d}?",
)  # fmt: skip
_ASK_VERBS = (*_DO, "need", "hide", "own", "like", "find", "start with", "end with", "go by")
_ASK_MAY = ("did", "does", "did", "does", "will", "must", "can", "should", "may", "would")
_ASK_FIRST = (
    "By the {where}: ", "In the {where}, ", "The {where} says it: ", "Somebody asked: ",
    "On {weekday} I need it: ", "Tell me, ", "Well, ", "Look into the {where}: ",
    "As the {where} has it, ", "By what you read, ",
)  # fmt: skip
_ASK_BEFORE = (
    "", "", "", "", "Please: ", "Question: ", "Now, ", "OK. ", "Look at the text above. ",
    "Read again. ", "Answer with a number: ", "Next: ", "Hello! ", "Q: ",
    "One more. ", "Based on these notes: ", "Think of the list. ",
)  # fmt: skip
_ASK_AFTER = (
    "", "", "", "", " Answer with the number only.", " Just the number.", " Be brief.",
    " Reply with digits.", " Thank you.", " I need it now.", " Only the number, please.", "\n",
)  # fmt: skip


def noun(dice: random.Random) -> str:
    """What the value is called: mostly a kind of number, else any word."""
    chance = dice.random()
    if chance < 0.75:
        return dice.choice(NOUNS)
    return dice.choice(QUALITIES) + " code" if chance < 0.9 else pseudo_word(dice)


def _fill(dice: random.Random, template: str) -> str:
    """Everything but key, noun and value."""
    return (
        template.replace("{verb}", dice.choice(_VERBS))
        .replace("{prep}", dice.choice(_PREPOSITIONS))
        .replace("{mark}", dice.choice(_MARKS))
        .replace("{weekday}", dice.choice(WEEKDAYS))
        .replace("{where}", dice.choice(_WHERES))
    )


def statement_template(dice: random.Random) -> str:
    """A way to state a fact."""
    chance = dice.random()
    if chance < 0.22:
        text = (
            f"the {{noun}} {{prep}} {{key}} {dice.choice(('is', 'is', 'was', '{verb}'))} {{value}}"
        )
    elif chance < 0.36:
        text = f"{{key}} {{verb}} {dice.choice(_DETERMINERS)} {{noun}} {{value}}"
    elif chance < 0.42:
        text = "{key} {verb} {value}"
    elif chance < 0.52:
        text = "{key}{mark}{value}"
    elif chance < 0.61:
        text = _clause(dice)
    elif chance < 0.70:
        text = _modal(dice)
    elif chance < 0.79:
        text = dice.choice(_FRAMES)
    elif chance < 0.83:
        text = _gap(dice)
    else:
        text = dice.choice(_SHAPES)
    before = dice.choice(_BEFORE) if dice.random() < 0.45 else ""
    if not before and dice.random() < 0.8 and text[0].islower():
        text = text[0].upper() + text[1:]
    return _fill(dice, before + text + dice.choice(_AFTER))


def _clause(dice: random.Random) -> str:
    """A sentence in which the number comes some words after the key."""
    comma = dice.choice((" ", " ", ", "))
    told = dice.choice(("the {noun} {value}", "the {noun} {value}", "{value}", "a {noun}: {value}"))
    return f"{dice.choice(_WHO)} {dice.choice(_LOOKS)} {{key}}{comma}{dice.choice(_THEN)} {told}"


def _modal(dice: random.Random) -> str:
    """Somebody may do something with a number; now and then somebody says so."""
    said = dice.choice(_BEFORE) if dice.random() < 0.3 else ""
    told = dice.choice(("the {noun} {value}", "the {noun} {value}", "{value}", "{noun} {value}"))
    return f"{said}{{key}} {dice.choice(_MAY)} {dice.choice(_HOW)}{dice.choice(_DO)} {told}"


def _gap(dice: random.Random) -> str:
    """Any words between the key and its number."""
    between = phrase(dice, dice.randint(1, 5))
    return dice.choice(
        (f"{{key}} {between} {{value}}", f"{{key}} {between} the {{noun}} {{value}}")
    )


def question_template(dice: random.Random) -> str:
    """A way to ask for one."""
    asked = dice.choice(_ASK) if dice.random() < 0.65 else _ask_do(dice)
    chance = dice.random()
    before = dice.choice(_ASK_FIRST) if chance < 0.2 else dice.choice(_ASK_BEFORE)
    if before.endswith(", ") and asked[0].isupper():
        asked = asked[0].lower() + asked[1:]
    return _fill(dice, before + asked + dice.choice(_ASK_AFTER))


def _ask_do(dice: random.Random) -> str:
    """Which number does somebody do something with?"""
    verb = dice.choice(_ASK_VERBS)
    may = dice.choice([may for may in _ASK_MAY if (may, verb) != ("does", "have")])
    which = dice.choice(("which", "what"))
    text = dice.choice(_ASK_DO).format(w=which, a=may, d=verb)
    return text[0].upper() + text[1:]
