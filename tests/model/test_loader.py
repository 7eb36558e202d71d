"""Safetensors checkpoints: whole, in shards, tied or not, and every way to be wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from model_helpers import (
    assert_close,
    config_json,
    hf_config,
    hf_logits,
    hf_model,
    paged_logits,
    random_tokens,
    save,
    write_folder,
)
from transformers import LlamaForCausalLM as HFLlama

from minibatch.errors import CheckpointError, UnsupportedModelError
from minibatch.model.loader import load_config, load_model


@pytest.fixture
def theirs() -> HFLlama:
    return hf_model(hf_config())


@pytest.fixture
def tied() -> HFLlama:
    return hf_model(hf_config(tie_word_embeddings=True))


def test_shards_load_as_one_file_does(theirs: HFLlama, tmp_path: Path) -> None:
    whole = load_model(save(theirs, tmp_path / "whole"))
    folder = save(theirs, tmp_path / "shards", max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    shards = load_model(folder)
    assert load_config(folder) == shards.config == whole.config
    for name, view in whole.checkpoint_views().items():
        assert torch.equal(view, shards.checkpoint_views()[name]), name


def test_weights_are_converted_on_the_way(theirs: HFLlama, tmp_path: Path) -> None:
    half = save(theirs.to(torch.bfloat16), tmp_path)
    assert load_config(half).torch_dtype == "bfloat16"
    full = load_model(half, dtype=torch.float32)
    assert {p.dtype for p in full.parameters()} == {torch.float32}
    for name, view in full.checkpoint_views().items():
        assert torch.equal(view, theirs.state_dict()[name].float()), name


def test_loaded_weights_outlive_the_file(theirs: HFLlama, tmp_path: Path) -> None:
    folder = save(theirs, tmp_path)
    ours = load_model(folder)
    tokens = random_tokens(9)
    before = paged_logits(ours, tokens)
    (folder / "model.safetensors").write_bytes(b"gone")
    assert torch.equal(paged_logits(ours, tokens), before)


def test_end_tokens_of_a_chat_model(theirs: HFLlama, tmp_path: Path) -> None:
    folder = save(theirs, tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    assert load_config(folder).eos_token_ids == (2, 5)


def test_tied_and_head_absent_is_shared(tied: HFLlama, tmp_path: Path) -> None:
    tensors = {k: v for k, v in tied.state_dict().items() if k != "lm_head.weight"}
    ours = load_model(write_folder(tmp_path, config_json(tied.config), tensors))
    assert ours.lm_head is None
    tokens = random_tokens(9)
    assert_close(paged_logits(ours, tokens), hf_logits(tied, tokens))


def test_tied_and_head_present_must_be_equal(tied: HFLlama, tmp_path: Path) -> None:
    tensors = dict(tied.state_dict())
    assert "lm_head.weight" in tensors
    ours = load_model(write_folder(tmp_path / "equal", config_json(tied.config), tensors))
    tokens = random_tokens(9)
    assert_close(paged_logits(ours, tokens), hf_logits(tied, tokens))
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
    folder = write_folder(tmp_path / "different", config_json(tied.config), tensors)
    with pytest.raises(CheckpointError, match=r"ties lm_head.*differs"):
        load_model(folder)


def test_untied_and_head_absent_is_an_error(theirs: HFLlama, tmp_path: Path) -> None:
    tensors = {k: v for k, v in theirs.state_dict().items() if k != "lm_head.weight"}
    folder = write_folder(tmp_path, config_json(theirs.config), tensors)
    with pytest.raises(CheckpointError, match=r"missing: lm_head\.weight"):
        load_model(folder)


def test_every_trouble_with_tensors_is_told_at_once(theirs: HFLlama, tmp_path: Path) -> None:
    tensors = dict(theirs.state_dict())
    del tensors["model.norm.weight"]
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(1)
    tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(48, 64)
    folder = write_folder(tmp_path, config_json(theirs.config), tensors)
    with pytest.raises(CheckpointError) as caught:
        load_model(folder)
    message = str(caught.value)
    assert str(folder) in message
    assert "missing: model.norm.weight" in message
    assert "not part of this model: model.layers.2.mlp.up_proj.weight" in message
    assert "model.layers.0.self_attn.k_proj.weight is [48, 64] and should be [32, 64]" in message


def test_long_lists_of_names_are_cut(theirs: HFLlama, tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path, config_json(theirs.config), {"model.norm.weight": torch.ones(64)}
    )
    with pytest.raises(CheckpointError, match="and 15 more"):
        load_model(folder)


def test_frequencies_saved_by_old_transformers_are_ignored(theirs: HFLlama, tmp_path: Path) -> None:
    tensors = theirs.state_dict() | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    load_model(write_folder(tmp_path, config_json(theirs.config), tensors))


def test_integers_are_no_weights(theirs: HFLlama, tmp_path: Path) -> None:
    tensors = theirs.state_dict() | {"model.norm.weight": torch.ones(64, dtype=torch.int8)}
    folder = write_folder(tmp_path, config_json(theirs.config), tensors)
    with pytest.raises(CheckpointError, match=r"model.norm.weight.*int8"):
        load_model(folder)


def test_another_architecture_is_named(theirs: HFLlama, tmp_path: Path) -> None:
    config = config_json(theirs.config) | {"architectures": ["Qwen2ForCausalLM"]}
    folder = write_folder(tmp_path, config, theirs.state_dict())
    with pytest.raises(UnsupportedModelError, match="Qwen2ForCausalLM"):
        load_model(folder)


class TestMissingAndDamagedFiles:
    def test_no_folder(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="there is no folder"):
            load_model(tmp_path / "nowhere")

    def test_no_config(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"no config.json"):
            load_model(tmp_path)

    @pytest.mark.parametrize("text", ["{", "[1]"])
    def test_config_is_not_an_object(self, text: str, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"config.json"):
            load_model(tmp_path)

    def test_no_weights(self, theirs: HFLlama, tmp_path: Path) -> None:
        theirs.config.save_pretrained(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps(config_json(theirs.config)))
        with pytest.raises(CheckpointError, match=r"neither model.safetensors nor"):
            load_model(tmp_path)

    def test_pickles_are_refused(self, theirs: HFLlama, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps(config_json(theirs.config)))
        torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
        with pytest.raises(
            CheckpointError, match=r"pytorch_model.bin.*convert them to safetensors"
        ):
            load_model(tmp_path)

    def test_a_shard_is_missing(self, theirs: HFLlama, tmp_path: Path) -> None:
        folder = save(theirs, tmp_path, max_shard_size="60KB")
        gone = sorted(folder.glob("*.safetensors"))[1]
        gone.unlink()
        with pytest.raises(CheckpointError, match=gone.name):
            load_model(folder)

    def test_an_index_without_shards(self, theirs: HFLlama, tmp_path: Path) -> None:
        folder = save(theirs, tmp_path)
        (folder / "model.safetensors.index.json").write_text("{}")
        with pytest.raises(CheckpointError, match="0 shards"):
            load_model(folder)

    @pytest.mark.parametrize("keep", [0, 5, 200, 0.5, 0.99])
    def test_weights_are_cut_short(self, theirs: HFLlama, tmp_path: Path, keep: float) -> None:
        folder = save(theirs, tmp_path)
        path = folder / "model.safetensors"
        whole = path.read_bytes()
        path.write_bytes(whole[: keep if isinstance(keep, int) else int(keep * len(whole))])
        with pytest.raises(CheckpointError, match=r"model.safetensors is cut short or damaged"):
            load_model(folder)


def test_loading_does_not_import_torchs_compiler(tmp_path: Path) -> None:
    """It takes a second and 100 MB, and drawing numbers on the meta device is enough for it."""
    path = save(hf_model(hf_config()), tmp_path)
    code = (
        "import sys; from minibatch.model.loader import load_model; "
        f"load_model({str(path)!r}); assert 'torch._dynamo' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
