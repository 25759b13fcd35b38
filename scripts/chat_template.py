#!/usr/bin/env python
"""Write a chat template with the layout of the paper's prompt (appendix G.1) from two texts of your own.

    python scripts/chat_template.py --system system.txt --question question.txt --out paper.jinja
    python scripts/train.py --gin gin/paper/qwen2_5_7b_instruct.gin --dry-run \\
        --set "Prompts.chat_template_from = 'paper.jinja'"

system.txt: the system message of a question that brings none; it is the prompt's first paragraph.
question.txt: a text with {question} once. What is behind it ends the prompt, and the response begins there: in the
paper the assistant's name and an opened <think>.
The last line break of each file does not count. A response ends in the tokenizer's end token. Exit status: 0, or 2 for
a text or a file that cannot be used.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from exgrpo_orlhf.io import terminal
from exgrpo_orlhf.io.files import read_text, write


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", type=Path, required=True, metavar="FILE", help="the system message")
    parser.add_argument("--question", type=Path, required=True, metavar="FILE", help="the words around {question}")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="the template, which must not exist yet"
    )
    arguments = parser.parse_args()
    terminal.messages()
    try:
        system, question = (read_text(file).removesuffix("\n") for file in (arguments.system, arguments.question))
        if question.count("{question}") != 1:
            raise ValueError(f"{arguments.question}: a text with {{question}} once is needed, got {question!r:.200}")
        if arguments.out.exists():
            raise FileExistsError(f"{arguments.out} exists; name another file with --out, or remove it")
        write(arguments.out, template(system, *question.split("{question}")))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{arguments.out}: Prompts.chat_template_from = {str(arguments.out)!r}")
    return 0


def template(system: str, before: str, behind: str) -> str:
    """before, behind: what is written around a question; a turn of the assistant follows `behind`."""
    system, before, behind = (json.dumps(text, ensure_ascii=False) for text in (system, before, behind))
    return f"""\
{{%- set own = messages[0].role == 'system' -%}}
{{{{- (messages[0].content if own else {system}) + '\\n' -}}}}
{{%- for message in messages[own:] -%}}
{{%- if message.role == 'assistant' -%}}{{{{- message.content + eos_token + '\\n' -}}}}
{{%- else -%}}{{{{- {before} + message.content + ({behind} if add_generation_prompt or not loop.last else '') -}}}}
{{%- endif -%}}
{{%- endfor -%}}
"""


if __name__ == "__main__":
    sys.exit(main())
