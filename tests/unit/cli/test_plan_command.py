"""`gnomon plan`: fits or not, where the memory goes, without a GPU and without weights."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from gnomon.cli.flags import refuse_foreign_flags
from gnomon.cli.main import build_app
from gnomon.errors import ConfigError


def planned(*arguments: str):
    return CliRunner().invoke(build_app(), ["plan", *arguments])


def test_deepseek_v32_fits_eight_h200_and_says_at_which_context():
    found = json.loads(planned("deepseek-v3.2", "--gpu", "h200", "--tp", "8", "--json").stdout)
    assert found["fits"]
    assert found["contexts"]["163840"] >= 1
    most = [found["contexts"][key] for key in sorted(found["contexts"], key=int)]
    assert most == sorted(most, reverse=True)
    assert most[0] <= 256  # max_num_seqs


def test_a_smaller_layout_holds_more_tokens():
    plain, packed = (
        json.loads(planned("glm-5", "--tp", "8", "--json", *flags).stdout)["num_cached_tokens"]
        for flags in ((), ("--kv-layout", "fp8_ds_mla"))
    )
    assert packed > 1.5 * plain


def test_what_does_not_fit_names_the_gpus_that_would():
    result = planned("deepseek-v3.2", "--tp", "2")
    assert result.exit_code == 1
    assert "does not fit" in result.stdout
    assert "8 GPUs of this kind would hold it" in result.stdout


def test_the_plan_is_readable():
    result = planned("glm-5.2", "--tp", "16", "--gpu", "b200")
    assert result.exit_code == 0
    for word in ("weights", "largest step", "graphs", "reserve", "cache", "run at once"):
        assert word in result.stdout


def test_tp_belongs_to_plan_alone():
    refuse_foreign_flags(["plan", "--tp", "8"])
    with pytest.raises(ConfigError, match="-tp"):
        refuse_foreign_flags(["serve", "--tp", "8"])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(("deepseek-v3.2", "--gpu", "h20"), "h200"), (("deepseek-v4",), "deepseek-v3.2")],
)
def test_unknown_names_are_answered_with_known_ones(arguments, named):
    assert named in str(planned(*arguments).exception)


def test_weights_that_are_dequantised_take_twice_as_much():
    kept, asked, unable = (
        planned("deepseek-v3.2", "--tp", "32", *flags, "--json").stdout
        for flags in ((), ("--weights", "dequantise"), ("--gpu", "a100-80"))
    )
    sizes = [
        float(next(line for line in json.loads(text)["lines"] if "weights" in line).split()[1])
        for text in (kept, asked, unable)
    ]
    assert sizes[1] == sizes[2]
    assert 1.8 < sizes[1] / sizes[0] < 2.0
    assert json.loads(kept)["weights"].startswith("fp8")
    assert json.loads(unable)["weights"].startswith("dequantise")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--tp", "3"), r"tp is 3: .* 128 heads.*Allowed are 1, 2, 4, 8, 16, 32, 64"),
        (("--tp", "1000"), "tp is 1000"),
        (("--tp", "128"), r"tp is 128: .*plans go to 64 GPUs.*Allowed are 1, 2, 4, 8, 16, 32, 64"),
        (("--device", "cpu"), "plan is for GPUs"),
        (("--decode-backend", "nonsense"), r"decode_backend is 'nonsense'.*flashmla"),
        (("--kv-layout", "fp9"), "cache layout 'fp9'"),
        (("--max-model-len", "1000000"), "max_position_embeddings = 163840"),
    ],
)
def test_what_no_memory_would_mend_is_refused_and_not_called_a_misfit(flags, named):
    result = planned("deepseek-v3.2", "--tp", "8", *flags)
    assert isinstance(result.exception, ConfigError)
    assert re.search(named, str(result.exception))
    assert "does not fit" not in result.stdout


def test_forced_backends_by_name_are_planned():
    assert planned("deepseek-v3.2", "--tp", "8", "--decode-backend", "triton").exit_code == 0
