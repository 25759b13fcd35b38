"""Multiple choice: an option's letter or digit, boxed or stated, or its text if the question lists its options.

meta["options"]: the options' texts in order, with or without their labels (A) 125), or {label: text}. Without them the
options are A to J, or digits where the gold is one. A gold that is a number, not text, counts the options from 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from .answer import Answer, Grader
from .boxes import BOX, last_box
from .extraction import OTHER_LANGUAGES, answer_part, last_statement
from .grade import Grade
from .latex import canonical, clean, plain_text, words
from .options import options_of

_LETTERS = "ABCDEFGHIJ"
# A label alone, whatever stands around it: C, (c), **D**.
_BARE = re.compile(r"[\s({\[<*\"'“‘「【]*([A-Za-z]|\d{1,2})[\s)}\]>.:,*\"'”’」】]*")
# A label and its option's text, and nothing else: (B) 12 metres; B: 12 metres; B - a cat; not B - x.
_WITH_TEXT = re.compile(
    r"(?:\(\s*([A-Za-z]|\d{1,2})\s*\)|([A-Za-z]|\d{1,2})\s*(?:[.):,]|-+\s(?=.*(?<!\\)\b[A-Za-z]{3})))[\s*]*(\S.*)",
    re.DOTALL,
)
# What may stand between "answer" and the label: the answer is **clearly option (B.
_FILLER = (
    r"(?:[\s:*=$({\[\"'“‘：（【「-]|<(?=[A-Z]>)|\\text|\\mathrm|\\textbf|\\mathbf|\\\(|[是为為はが은는이가]|应该|應該|选项?|選項?"
    r"|\b(?:must|should|will|(?:seems|appears|has)\s+to)\s+be\b|\b(?:est|ist|lautet|es|é|è|la|le|die|correcta?|richtige?)\b"
    r"|\b(?:is|are|be|option|choice|letter|the|therefore|clearly|definitely|likely|probably|most|simply|correct|answer|one|but|both|either)\b){0,40}"
)
# A statement, with the label and what follows it: the answer is B; I choose (C); 答案是D; #### 3. Not answer: E = mc^2.
_STATED = re.compile(
    rf"(?:\b(?:answers?|choice|option|choose|pick|select|go\s+with|{OTHER_LANGUAGES})\b|答案|[选選][择擇项項]?|答え|正解|解答|정답|답|####)"
    rf"(?:\s+(?:to\s+the\s+question|here))?{_FILLER}(?P<hedge>\b(?:might|may|could|would|can)\s+be\b{_FILLER})?"
    r"([A-Za-z]|\d{1,2})(?![A-Za-z0-9'’]|[.,]\d|\s*[\^+]|_[\d{]|\s*=\s*[A-Za-z\\])(?=(?P<after>[^\n]{0,12}))",
    re.IGNORECASE,
)
# What begins a statement that is no more than a mention where words follow: option B says; choice (C) is too small.
_MENTION = re.compile(r"(?:option|choice|选项|選項)[\s*($\"“]*", re.IGNORECASE)
# A statement that begins with the label: (B) is correct; C must be the right answer. A alone may be an article.
_IS_RIGHT = re.compile(
    r"(?:\(([A-J]|\d)\)|\b([B-J]|\d))\s*(?:\*\*\s*)?(?:is|must\s+be)\s+(?:the\s+)?(?:correct|right|best|true|answer)"
    r"|([A-J])\s*[)）]?\s*(?:が|は|이|가|是|项)?\s*(?:正解|正しい|正确|정답)",
    re.IGNORECASE,
)
# A short response that begins with the label: B. Because …
_LEADING = re.compile(r"^[\s*]*(?:\(\s*([A-Z])\s*\)|([A-Z])\s*[.):])(?=[\s*]|$)")
_WORD_AFTER = re.compile(r"[)*$]*(?:\s\w|(?!是?(?:正确|对))[\u4e00-\u9fff])")
# A box; with a label in group 1, if that is all it has.
_A_BOX = re.compile(
    BOX.pattern + r"\{(?:\s*(?:\\text\w*\s*\{)?\s*\(?([A-J])\)?\.?\s*\}?\s*\}|(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})"
)
# What begins with a label, though it gives no option: another label, or several.
_LIKE_A_LABEL = re.compile(r"\W*(?:[Oo]ption|[Cc]hoice|[Aa]nswer)?\W*[A-Z](?:\W*$|\s*[).:,/&(]|\s(?:or|and)\s)")
# A label in brackets, anywhere: so it is (C) after all.
_IN_BRACKETS = re.compile(r"\(\s*([A-Z]|\d)\s*\)")
# What is ruled out, which is cut out of the text: not B; neither A nor (C); isn't option D; rather than B, but; option
# D is incorrect.
_NOT = re.compile(
    r"(?:\b(?:not|neither|nor|rather\s+than|instead\s+of|other\s+than|pas|nicht|no\s+es|non\s+è|não\s+é)|n['’]t(?:\s+be)?|\b(?:cannot|not)\s+be)\s"
    r"(?:option\s|choice\s)?[\s*$(\"“]{0,5}[A-J]\b(?!['’])[*$)\"”]*"
    r"(?:\s?,?\s?\b(?:or|nor)\s[*$(]*[A-J]\b[)*$]*)?(?:\s?,?\s?but\b)?"
    r"|\b(?:[Oo]ptions?|[Cc]hoices?|[Aa]nswers?)\s[\s*$(]*[A-J]\b[*$)]*\s(?:is|was)"
    r"(?:n['’]t\b|\s(?:(?:clearly|also|therefore)\s)?(?:not\b|incorrect|wrong|false|ruled\sout))"
    r"|(?:不是|并非|不选|不選)\s*[A-J]|[A-J]\s*[)）]?\s*(?:では\s?な|じゃな|는?\s?아니|가 아니|不|是错|错)"
)
# A second label right behind one, which makes it no answer: B or C; (A)(B); A/C. Not a word: "B. A ball", "or I am".
_MORE = re.compile(
    r"[)*$\]}\"”]*(?:\s?,?\s?\b(?:or|and|ou|oder|und|et)\s|\s?[,/&、或和及とか]\s?|\s?(?=\([A-Z]\)))[*$(\[\"“]*"
    r"([B-HJ-Z]|[AI](?!\s[a-z])|\d)\b(?!['’])(?!\W{0,3}\s(?:is|are|was|were|am|do|does|can|could|would|will|ha[sd]|have|being|seems?)\b)"
)
# A label with its text in the last line: It is B) London.
_STANDING = re.compile(r"(?<![A-Za-z(])\(?([A-Z]|\d{1,2})(?:[).:]\**|\s[-–—]\s)\s*(\S[^\n]*)")
# A label that ends the last line: hence, C.
_TRAILING = re.compile(r"(?:^|[\s*(])([A-Z])\s*[.)*\s]*$")
# The rest of a label's clause: B) Rome.
_CLAUSE = re.compile(r"[ ).:\]}*\"–—-]*([^\n;]*?)(?:(?<!\d)\.(?:\s|$)|[\n;]|$)")
# A sign that `words` leaves out though it makes another number or term: -5, -x, .5, 5!; not 10-20, e-mail, x-ray.
_SIGN = re.compile(r"(?<![\w)}\]])-(?=[\d.\\]|[A-Za-z]\b)|(?<!\d)\.(?=\d)|(?<=[\d)])!")
# Before a last label another one: A or (B), A, B.
_SEVERAL = re.compile(r"\b[A-J]\)?(?:,?\s*(?:or|and)\s|\s*[,/&]|(?<=\))\s?)[\s*(]*$")


def gold_option(gold: str) -> tuple[str, str] | None:
    """(label, text) of a gold that is an option: C, (C), \\text{(C)}, C., (C) its text. None for any other gold."""
    plain = plain_text(clean(gold)).strip()
    if match := re.fullmatch(r"\(?\s*([A-J])\s*[).:]*", plain):
        return match[1], ""
    match = re.fullmatch(r"(?:\(\s*([A-J])\s*\)|([A-J])\s*[.)])\s*(\S.*)", plain, re.DOTALL)
    if match and re.search(r"[A-Za-z]{2}", match[3]):
        return match[1] or match[2], match[3]
    return None


def grader() -> Grader:
    return grade


def grade(answer: Answer) -> Grade:
    """A letter outside the question's options is wrong where it is given as the answer, and ignored elsewhere."""
    options = options_of(answer.meta.get("options"))
    gold = str(answer.gold).strip()
    label, text = gold_option(gold) or (plain_text(clean(gold)).strip().upper(), "")
    if type(answer.gold) in (int, float) and gold not in options and answer.gold in range(len(options)):
        label = [*options][int(answer.gold)]
    if options and label not in options:
        label = _label(gold, options) or label
    if options and label not in options:
        fix = "it may be a label, an option's text, or a number (not text) that counts the options from 0"
        return Grade("error", None, reason=f"the gold {gold!r:.60} is none of the options {', '.join(options)}; {fix}")
    if not re.fullmatch(r"[A-Z]|\d{1,2}", label):
        reason = f"the gold {gold!r:.60} is no option: a letter, a digit, or an option's text"
        return Grade("error", None, reason=reason)
    if not options:
        labels = [str(i) for i in range(10)] if label.isdigit() else list(_LETTERS)
        options = dict.fromkeys(labels, "")
        options[label] = text
    pick, extracted = stated(answer.response, options)
    if pick is None and not extracted:
        return Grade("no_answer", 0.0)
    if pick is not None and (pick == label or _plain(options[label]) == _plain(options[pick]) != ""):
        return Grade("correct", 1.0, extracted=pick)
    return Grade("wrong", 0.0, extracted=pick or extracted)


def stated(response: str, options: Mapping[str, str]) -> tuple[str | None, str | None]:
    """(the option that a response gives, or None; the text that was given as the answer, or None)."""
    text, inside = answer_part(response)
    box = last_box(text)
    if box is not None:
        plain = plain_text(clean(box)).strip()
        if (pick := _label(box, options)) or _LIKE_A_LABEL.match(plain) or ("1" in options and plain.isdigit()):
            return pick, box
        if inside and (pick := _label(inside, options)):
            return pick, pick
        # A box of the reasoning, x = 2: what is stated beside it counts. "Answer: \boxed{D}" is a statement too.
        text = _A_BOX.sub(lambda match: f" {match[1] or ';'} ", text)
        firm = _statements(_NOT.sub(" ", text), options)[0]
        return (firm[-1] or None, firm[-1] or box) if firm else (None, box)
    if inside and (pick := _label(inside, options)):
        return pick, pick
    pick = _label(text, options) if len(text) <= 300 and "\n" not in text.strip() else None
    if pick is not None and (_BARE.fullmatch(plain_text(clean(text)).strip()) or _by_text(text, options)):
        return pick, pick
    text = _NOT.sub(" ", text)
    firm, mentions, hedged = _statements(text, options)
    if statements := firm or mentions:  # a statement of several options is no answer
        return statements[-1] or None, statements[-1] or text[-100:]
    if any(options.values()) and (pick := _label(last_statement(text) or "", options)):
        return pick, pick
    lines = [line for line in text.split("\n") if line.strip()]
    if not lines:
        return None, None
    last = lines[-1][-400:]
    if (pick := _label(last, options)) and (_BARE.fullmatch(plain_text(last).strip()) or _by_text(last, options)):
        return pick, pick
    for place in _STANDING.finditer(last):  # It is B) London
        label, after = place[1], words(place[2])
        if (option := words(options.get(label, ""))) and (after == option or after.startswith(option + " ")):
            return label, label
    bold = re.findall(r"\*\*([^*]+)\*\*", last)
    if bold and (pick := _by_text(bold[-1], options)):
        return pick, pick
    # The remaining signs are weaker: their position decides.
    if (match := _LEADING.match(text)) and len(lines) <= 2 and (label := match[1] or match[2]) in options:
        return (None, text) if _another(text, match.end(), label, options) else (label, match[0].strip())
    tail = text[-2000:]
    for match in [*_IN_BRACKETS.finditer(tail)][::-1]:
        if match[1] in options:
            several = _SEVERAL.search(tail[: match.start(1)]) or _another(tail, match.end(1), match[1], options)
            return (None, tail) if several else (match[1], match[0])
    if (match := _TRAILING.search(last)) and match[1] in options and not _SEVERAL.search(last[: match.start(1)]):
        return match[1], match[1]
    return (hedged[-1] or None, hedged[-1] or text[-100:]) if hedged else (None, None)


def _statements(text: str, options: Mapping[str, str]) -> list[list[str]]:
    """The labels of all statements, in their order; of options that are only mentioned; and of those that might be the
    answer. '' where one names several."""
    ranks: tuple[list[tuple[int, str]], ...] = [], [], []
    for match in _STATED.finditer(text):
        label = match[2].upper()
        after = match["after"]
        # "The answer is a matter of …": a lower-case letter, or an A, is a label only where no word follows.
        word_follows = re.match(r"\s+[a-z]+", after) and not re.match(
            r"\s+(?:because|since|as|due|and|or|so|is|with|for|which|that|in|by|but|given|where|if|would|from|here)\b",
            after,
        )
        if label in options and not (word_follows and (match[2].islower() or label in "AI")):
            mentioned = _MENTION.fullmatch(text, match.start(), match.start(2)) and _WORD_AFTER.match(after)
            rank = 1 if mentioned else 2 if match["hedge"] else 0
            ranks[rank].append((match.start(2), "" if _another(text, match.end(2), label, options) else label))
    for match in _IS_RIGHT.finditer(text):
        label = (match[1] or match[2] or match[3]).upper()
        if label in options:
            ranks[0].append((match.start(), label))
    return [[label for _, label in sorted(rank)] for rank in ranks]


def _another(text: str, end: int, label: str, options: Mapping[str, str]) -> bool:
    """Whether a label that ends there is joined with another option's, (A) or (B), (A)(B), or with another's text."""
    joined = _MORE.match(text, end)
    if joined is not None and joined[1] in options and joined[1] != label:
        return True
    clause = _CLAUSE.match(text, end)
    return clause is not None and _contradicts(clause[1], label, options)


def _contradicts(text: str, label: str, options: Mapping[str, str]) -> bool:
    """Whether what stands behind a label is the text of another option."""
    return bool(options[label]) and _content(options[label]) != _content(text) and _by_text(text, options) is not None


def _label(text: str, options: Mapping[str, str]) -> str | None:
    """The option that a short text names: by its label, by label and text, or by its text."""
    plain = plain_text(clean(text)).strip()
    plain = re.sub(r"^(?:option|choice|answer)\s*[:=]?\s*", "", plain, flags=re.IGNORECASE)
    if (match := _BARE.fullmatch(plain)) and match[1].upper() in options:
        return match[1].upper()
    if exact := [label for label, option in options.items() if option and _plain(option) == _plain(plain)]:
        return exact[0]
    spaced = [label for label, option in options.items() if option and _unspaced(option) == _unspaced(text)]
    if len(spaced) == 1:  # x = 2 is x=2
        return spaced[0]
    match = _WITH_TEXT.fullmatch(plain)
    if match is None or (label := (match[1] or match[2]).upper()) not in options:
        return _by_text(plain, options)
    if _another(plain, max(match.end(1), match.end(2)), label, options):
        return None
    return None if _contradicts(match[3], label, options) else label


def _by_text(text: str, options: Mapping[str, str]) -> str | None:
    """The option with this text, or the first of several that are written alike."""
    content = _content(text)
    labels = [label for label, option in options.items() if content[0] and option and _content(option) == content]
    return labels[0] if len({_plain(options[label]) for label in labels}) == 1 else None


def _plain(text: str) -> str:
    """An option's text, for telling whether two are written alike."""
    return " ".join(plain_text(text).split()).rstrip(". ")


def _unspaced(text: str) -> str:
    """An option's text without spaces, and a number without the commas of its thousands."""
    text = canonical(clean(text))
    return text.replace(",", "") if re.fullmatch(r"[-$]*\d{1,3}(?:,\d{3})+(?:\.\d+)?%?", text) else text


def _content(text: str) -> tuple[str, int]:
    """The words of a text, and how many signs it has beside them."""
    return words(text), len(_SIGN.findall(re.sub(r"\s", "", clean(text))))
