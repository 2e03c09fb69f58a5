"""The whole step on the CPU device against transformers and torch, in F32."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.models import (
    CONFIGS,
    GRADIENT_RTOL,
    LOSS_RTOL,
    TEN_STEPS_RTOL,
    exported,
    hf_model,
    pieces,
    random_batch,
    same_gradients,
    step_as_torch,
    torch_loss,
    trainer_for,
)


@pytest.fixture(params=CONFIGS)
def models(request, tmp_path):
    """A model in torch, and its export."""
    model = hf_model(request.param)
    model.save_pretrained(tmp_path)
    return model, tmp_path


def test_loss_and_every_gradient_match_torch(models, device):
    model, path = models
    with trainer_for(path, device=device) as trainer:
        step_as_torch(trainer, [random_batch(np.random.default_rng(0))], model)


@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_a_soft_cap_of_logits_is_that_of_transformers(cap, device):
    """Losses, gradients and predicted tokens with a soft cap equal transformers'."""
    path, model = exported("gemma3", final_logit_softcapping=cap), hf_model("gemma3")
    model.config.final_logit_softcapping = cap
    batches = [random_batch(np.random.default_rng(0))]
    with trainer_for(path, device=device) as trainer:
        step_as_torch(trainer, batches, model)
        text = batches[0][0][0][:9].tolist()
    with trainer_for(path, device=device, learning_rate=0.0) as trainer:
        ((made,),) = trainer.generate([text], max_new_tokens=1, temperature=0)
    want = model(torch.tensor([text])).logits[0, -1].log_softmax(-1).detach()
    assert made.ids == [want.argmax()]
    np.testing.assert_allclose(made.logprobs, want.max(), rtol=1e-5)


@pytest.mark.parametrize("name", ["qwen3", "llama", "gemma3", "gpt2"])
def test_the_row_of_padding_has_the_gradient_of_transformers(name, device):
    """None from looking it up, that of the head where this is the same matrix; GPT-2's has all."""
    pad = 7
    path, model = exported(name, pad_token_id=pad), hf_model(name, pad_token_id=pad)
    inputs, targets = random_batch(np.random.default_rng(0))
    inputs[:, ::3] = pad
    with trainer_for(path, device=device) as trainer:
        result = trainer.step([(inputs, targets)])
        ours = pieces(trainer, trainer.gradients())
    torch_loss(model, [(inputs, targets)]).backward()
    embedding = model.get_input_embeddings().weight
    (key,) = (n for n, p in model.named_parameters() if p is embedding)
    for row in (embedding.grad[pad].numpy(), ours[key][pad]):
        assert (name == "llama") == (np.abs(row).max() == 0)
    error = np.linalg.norm(ours[key] / result.tokens - embedding.grad.numpy(), axis=1)
    assert error.max() <= GRADIENT_RTOL * np.linalg.norm(embedding.grad.numpy())


TWINS = ("qwen2_moe", "olmoe", "mixtral", "qwen3_5_moe", "qwen3_next")
FEW = [name for name in CONFIGS if name not in TWINS]


@pytest.mark.parametrize("models", FEW, indirect=True)
def test_ten_adamw_steps_match_torch(models, device):
    model, path = models
    rng = np.random.default_rng(1)
    trainer = trainer_for(
        path,
        device=device,
        grad_accumulation=2,
        weight_decay=0.1,
        grad_clip=0.5,
        learning_rate=2e-3,
    )
    named = dict(model.named_parameters())  # biases of experts have two dimensions
    decays = {n: p.dim() > 1 and not n.endswith("bias") for n, p in named.items()}
    decayed = [p for n, p in named.items() if decays[n]]
    others = [p for n, p in named.items() if not decays[n]]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95), eps=1e-8)
    for _ in range(10):
        batches = [random_batch(rng) for _ in range(2)]
        optimizer.zero_grad()
        loss = torch_loss(model, batches)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        result = trainer.step(batches)
        np.testing.assert_allclose(result.loss, loss.item(), rtol=TEN_STEPS_RTOL)
        np.testing.assert_allclose(result.norm, norm.item(), rtol=TEN_STEPS_RTOL)
    assert norm > 0.5, "the clipping was not tested"


RECOMPUTE = ["swiglu", "norm", "ffn", "qkv", "att", "block"]


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "deepseek_v3"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_recompute_and_chunks_are_bitwise_equal_or_close(name, dtype, tmp_path):
    hf_model(name).save_pretrained(tmp_path)
    batches = [random_batch(np.random.default_rng(2)) for _ in range(2)]

    def run(**options: object) -> tuple:
        with trainer_for(tmp_path, model_dtype=dtype, grad_accumulation=2, **options) as trainer:
            results = [trainer.step(batches) for _ in range(2)]
            assert trainer.usage == trainer.plan.usage
            return results, trainer.weights()

    results, weights = run()
    for flag in RECOMPUTE:
        again, same = run(**{f"recompute_{flag}": True})
        assert again == results, flag
        assert all(np.array_equal(weights[n], same[n]) for n in weights), flag
    again, same = run(attn_bwd_chunks=2)
    assert again == results
    # Chunks of the head change the order of one sum, and nothing before it.
    assert run(lmhead_chunks=4)[0][0].loss == results[0].loss


def test_loss_ignores_how_a_step_is_cut_into_micro_steps(tmp_path):
    hf_model("qwen2").save_pretrained(tmp_path)
    inputs, targets = random_batch(np.random.default_rng(3), B=4)
    with trainer_for(tmp_path, batch_size=4) as whole:
        one = whole.step([(inputs, targets)])
    with trainer_for(tmp_path, batch_size=1, grad_accumulation=4) as parts:
        four = parts.step([(inputs[i : i + 1], targets[i : i + 1]) for i in range(4)])
    assert one.tokens == four.tokens
    # The same tokens, summed in another order.
    np.testing.assert_allclose([one.loss, one.norm], [four.loss, four.norm], rtol=1e-6)


def test_fully_masked_step_changes_nothing(tmp_path, device):
    hf_model("qwen2").save_pretrained(tmp_path)
    inputs, targets = random_batch(np.random.default_rng(4))
    with trainer_for(tmp_path, device=device) as trainer:
        before = trainer.weights()
        result = trainer.step([(inputs, np.full_like(targets, -100))])
        after = trainer.weights()
    assert result.tokens == 0
    assert all(np.array_equal(before[n], after[n]) for n in before)


def test_z_loss_adds_half_the_squared_log_sum_exp_of_targets(tmp_path):
    model, (inputs, targets) = hf_model("qwen2"), random_batch(np.random.default_rng(5))
    model.save_pretrained(tmp_path)
    loss = torch_loss(model, [(inputs, targets)])
    squares = model(torch.from_numpy(inputs).long()).logits.logsumexp(-1) ** 2
    (loss + 0.5 * 0.3 * squares[torch.from_numpy(targets) >= 0].mean()).backward()
    with trainer_for(tmp_path, z_loss=0.3) as trainer:
        result = trainer.step([(inputs, targets)])
        ours = pieces(trainer, trainer.gradients())
    assert result.loss == pytest.approx(loss.item(), rel=LOSS_RTOL)
    found = {name: gradient / result.tokens for name, gradient in ours.items()}
    same_gradients(found, model, result.norm)
