"""A fault on the device ends the engine's process, not the parent: every stream says in which step.

The parent learns of the death by the event and by the pipe. What was written down is done again.
"""

from __future__ import annotations

import asyncio
import json

import pytest

from gnomon.engine.assembly import assemble
from gnomon.engine.client import ProcessClient
from gnomon.engine.config import EngineConfig
from gnomon.engine.launch import EngineProcess
from gnomon.engine.lost_step import again, config_for, read_lost_step
from gnomon.engine.messages import EngineRequest
from gnomon.engine.sampling_params import SamplingParams
from gnomon.errors import EngineDeadError

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("fault", "is_recorded"), [("build", False), ("build", True), ("build_triton", True)]
)
def test_a_fault_on_the_device_ends_the_engine_process_alone(tmp_path, fault, is_recorded):
    folder = tmp_path / "records"
    config = EngineConfig.of(
        model="random:deepseek_v32,layers=2",
        device="cuda",
        num_kv_pages=64,
        gpu_memory_utilization=1.0,  # other tests hold some of the device
        max_num_seqs=4,
        record=str(folder) if is_recorded else None,
    )
    process = EngineProcess(
        config, build=f"tests.gpu.faulty_engine:{fault}", default_vocab_size=512
    )

    async def scenario() -> str:
        client = ProcessClient(process, 60.0)
        client.attach()
        params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
        one = EngineRequest(request_id="r", prompt_token_ids=[5, 6, 7], params=params)
        try:
            stream = client.submit([one])
            with pytest.raises(EngineDeadError) as caught:
                async for _ in stream:
                    pass
            with pytest.raises(EngineDeadError):  # what the server answers with 503
                client.submit([one])
            return str(caught.value)
        finally:
            client.close()

    try:
        said = asyncio.run(scenario())
    finally:
        process.close()
    assert "CUDA" in said
    assert "in step " in said
    if is_recorded:
        (path,) = folder.glob("*-lost.json")
        assert json.loads(path.read_text())["requests"][0]["request_id"] == "r"
        lost = read_lost_step(path)
        changes = {"check": "full", "gpu_memory_utilization": 1.0}
        parts = assemble(config_for(lost, None, changes), lambda *_: None, lost.vocab_size)
        assert again(lost, parts, lambda *_: None) == {}  # the fault was not the step's own
