"""Which steps are recorded, and where the files go.

In:  the flags record, record_steps and redact; recordings.
Out: files in the folder, one per step, mode 0600, at most MAX_KEPT of each kind in one run of the
     engine, so that a fault in every step cannot fill a disk.
Not here: capturing (attention/recording_capture.py), running the steps (record_witness.py).
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from gnomon.attention.recording import Recording
from gnomon.attention.recording_file import SUFFIX, own_folder, write_private, write_recording
from gnomon.attention.recording_redact import redacted
from gnomon.engine.config import EngineConfig
from gnomon.engine.lost_step import SUFFIX as LOST_SUFFIX
from gnomon.engine.lost_step import facts_of
from gnomon.engine.schedule_step import StepSchedule
from gnomon.errors import ConfigError, GnomonError

logger = logging.getLogger(__name__)

ON_FAILURE = "on-failure"
MAX_KEPT = {"chosen": 256, "failed": 8, "shadow": 8}


@dataclass(frozen=True, slots=True)
class RecordRules:
    """Steps first..last (and every step that fails) go to ``folder``; ``steps`` () is none."""

    folder: Path
    steps: range
    is_redacted: bool
    flags: Mapping[str, Any] = field(default_factory=dict)  # of the engine, as they were given

    @classmethod
    def of(cls, config: EngineConfig) -> RecordRules | None:
        """The rules of these flags, None without --record; touches nothing.

        ConfigError for steps that cannot be read, and for flags that need --record.
        """
        if config.record is None:
            for name, value in (("record_steps", config.record_steps), ("redact", config.redact)):
                if value not in (False, ON_FAILURE):
                    raise ConfigError(f"{name} is {value!r} but record is not given: name a folder")
            return None
        steps = parse_steps(config.record_steps)
        return cls(Path(config.record), steps, config.redact, config.given())

    def prepare(self) -> None:
        """Make the folder; ConfigError if others may enter it."""
        own_folder(self.folder)


def parse_steps(text: str) -> range:
    """The steps of "12" or "12..15" (they count from 1); none for "on-failure"."""
    found = re.fullmatch(r"(\d{1,15})(?:\.\.(\d{1,15}))?", text.strip())
    if text.strip() == ON_FAILURE:
        return range(0)
    if found is None or int(found[1]) > int(found[2] or found[1]):
        raise ConfigError(
            f'record_steps is {text!r}: it has to be "on-failure", a step such as "12", or the '
            'first and the last step such as "12..15".'
        )
    return range(int(found[1]), int(found[2] or found[1]) + 1)


class StepRecorder:
    """Writes recordings by the rules; never raises for a disk that is full or gone."""

    def __init__(self, rules: RecordRules) -> None:
        rules.prepare()
        self.rules = rules
        self._started = time.strftime("%Y%m%d-%H%M%S")
        self._num_kept: dict[str, int] = dict.fromkeys(MAX_KEPT, 0)

    def wants(self, step_id: int) -> bool:
        """Whether this step is one of the chosen ones."""
        return step_id in self.rules.steps

    def has_room(self, kind: str) -> bool:
        """Whether one more recording of this kind is kept."""
        return self._num_kept[kind] < MAX_KEPT[kind]

    def keep(self, recording: Recording, kind: str) -> Path | None:
        """Write one file; its path, or None if it could not be written (the log says why)."""
        if not self.has_room(kind):
            return None
        self._num_kept[kind] += 1
        step_id = 0 if recording.step is None else recording.step.step_id
        name = f"{self._started}-step-{step_id}" + ("" if kind == "chosen" else f"-{kind}")
        path = next(path for number in count(1) if not (path := self._path(name, number)).exists())
        kept = redacted(recording) if self.rules.is_redacted else recording
        try:
            write_recording(path, kept)
        except GnomonError as error:
            logger.error("step %d could not be recorded: %s", step_id, error)
            return None
        logger.warning("step %d is recorded (%s): gnomon replay %s", step_id, kind, path)
        return path

    def keep_facts(
        self, schedule: StepSchedule, error: str, origin: Mapping[str, Any]
    ) -> Path | None:
        """Write what the host knows of a step that took the device with it; its path, or None.

        ``origin``: versions and the vocabulary's size. See lost_step.py.
        """
        known = {**origin, "flags": dict(self.rules.flags)}
        facts = facts_of(schedule, error, known, self.rules.is_redacted)
        path = self.rules.folder / f"{self._started}-step-{schedule.step_id}{LOST_SUFFIX}"
        try:
            write_private(path, json.dumps(facts, indent=1).encode())
        except GnomonError as problem:
            logger.error("step %d could not be written down: %s", schedule.step_id, problem)
            return None
        words = "" if self.rules.is_redacted else f": gnomon replay {path}"
        logger.error("what is known of step %d is in %s%s", schedule.step_id, path, words)
        return path

    def _path(self, name: str, number: int) -> Path:
        return self.rules.folder / (name + ("" if number == 1 else f"-{number}") + SUFFIX)
