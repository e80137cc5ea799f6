"""A server under an even load of all kinds of requests: a short form of benchmarks/soak.py, and its bars."""

from __future__ import annotations

import asyncio
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

import qcompile
from qcompile.runtime.chat import chat_template
from tests.runtime.server.test_server import serving
from tests.support import adapters
from tests.support.mixture import TEMPLATE, Case, Outcome, cases, references, session
from tests.support.processes import Usage
from tests.support.soak import Plan, Soak, Window, misses, soak

PLAN = Plan(seconds=1.2, window=0.4, sample=0.1, warm=0.4)


def test_all_kinds_of_requests_get_their_own_answers(tiny_checkpoint: Path, tmp_path: Path) -> None:
    checkpoint, artifact, adapter = tmp_path / "model", tmp_path / "artifact", tmp_path / "adapter"
    shutil.copytree(tiny_checkpoint, checkpoint)
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE)
    qcompile.build(str(checkpoint), artifact, recipe="w4a8", drafts=["lookup"], options={"lora.rank": 4})
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint))
    adapters.save(adapter, adapters.adapter_of(model, "q_proj down_proj"))
    asked = cases(tokens=8, long_tokens=150, adapter="style")[:9]

    async def measured(root: str) -> Soak:
        async with session() as clients:
            wanted = await references(clients, root, asked)
            return await soak(clients, root, os.getpid(), (asked, wanted), rate=40, plan=PLAN)

    with qcompile.load(artifact, threads=1, lora={"style": adapter}) as llm:
        template = chat_template(artifact, llm.manifest["files"])
        with serving(llm, template=template) as client:
            done = asyncio.run(measured(f"http://127.0.0.1:{client.port}"))
    assert not done.wrong and not done.lost
    assert done.sent == 48 and sum(window.answered + window.cut for window in done.windows) >= 40
    assert all(window.samples for window in done.windows)


def steady() -> Soak:
    """A soak that misses no bar."""
    usage = Usage(processes=2, memory=1000, files=20, threads=8, seconds=1.0)
    return Soak(PLAN, [Window(answered=100, samples=[usage]) for _ in range(3)])


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("memory", 1021, "memory grew by 2.1% after the warm-up"),
        ("files", 23, "files: 20 after the warm-up, 23 at the end"),
        ("threads", 11, "threads: 8 after the warm-up, 11 at the end"),
    ],
)
def test_what_grows_is_told(name: str, value: int, told: str) -> None:
    done = steady()
    assert misses(done) == []
    done.windows[-1].samples = [replace(done.windows[-1].samples[0], **{name: value})]
    assert misses(done) == [told]


def test_what_is_wrong_lost_or_slow_is_told() -> None:
    done, case = steady(), Case("plain", {})
    done.note(case, Outcome("a", "", 200, 1, 0.1), "b", at=0.0)
    done.note(case, Outcome("", "status 500", 500, 0, 0.1), "b", at=0.0)
    done.windows[1].answered = 90
    assert misses(done) == ["wrong: {'plain': 1}", "lost: {'plain: status 500': 1}", "window 1: throughput -7.2%"]
