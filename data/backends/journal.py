"""Answers of a unit in work, one JSON line each, durable before the next request is sent (case 16)."""

import json
import os
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from data.generate import Answer
from recipes.files import sync_folder


class Journal:
    """What a killed run left of a unit. A torn last line is cut off; another key begins a new journal."""

    def __init__(self, path: Path, key: str) -> None:
        self.path, self.key = path, key
        self.answers: dict[str, Answer] = {}
        self.counts: Counter = Counter()  # what happened on the way, mostly failed attempts by reason
        self.good = 0  # bytes that were read whole
        self.file = None
        if path.exists():
            self.load(path.read_bytes())

    def load(self, content: bytes) -> None:
        for number, line in enumerate(content.splitlines(keepends=True)):
            try:
                row = json.loads(line)
                if not line.endswith(b"\n") or (number == 0 and row != {"key": self.key}):
                    return
                if "answer" in row:
                    answer = Answer(**row["answer"])
                    self.answers[answer.id] = answer
                elif "count" in row:
                    self.counts[row["count"]] += 1
            except (ValueError, TypeError):
                return
            self.good += len(line)

    def add(self, answer: Answer) -> None:
        """Keeps a finished answer; returns when it is on the disk."""
        self.answers[answer.id] = answer
        self.write({"answer": asdict(answer)})
        os.fsync(self.file.fileno())

    def count(self, reason: str) -> None:
        self.counts[reason] += 1
        self.write({"count": reason})

    def write(self, row: dict) -> None:
        if self.file is None:
            self.file = open(self.path, "ab")  # noqa: SIM115 - stays open until close()
            self.file.truncate(self.good)
            sync_folder(self.path.parent)
            if self.good == 0:
                self.write({"key": self.key})
        self.file.write(json.dumps(row).encode() + b"\n")
        self.file.flush()

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None

    def remove(self) -> None:
        """The unit is complete elsewhere."""
        self.close()
        self.path.unlink(missing_ok=True)
