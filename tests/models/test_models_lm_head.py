"""The loss of all families: the sum over the labels that count, divided within the operation that computes it."""

import pytest
import torch
from peft_models import batch_of, model_of
from tiers import looped, spread

from stoker.models.lm_head import token_loss


@pytest.mark.parametrize(
    ("family", "denominator", "training"),
    spread(("gpt", "t5"), (10.0, torch.tensor(10.0), torch.tensor(10)), (True, False)),
    ids=str,
)
def test_nothing_is_left_to_multiply_gradients_with(family, denominator, training):
    """Backward starts in the operation, with a gradient of 1: there is no division behind it."""
    model, batch = model_of(family, None), batch_of(family)
    model.train(training)
    batch["labels"][:, 2:4] = -100
    loss = model.batch_loss(batch, denominator)
    assert loss.grad_fn is not None
    assert "linear_cross_entropy" in loss.grad_fn.name()
    torch.testing.assert_close(loss, model.batch_loss(batch, torch.ones(())) / 10, rtol=1e-13, atol=0)
    assert loss.dtype == torch.float64


@looped(("dtype", "of_loss"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
@looped("denominator", [3.0, torch.tensor(3.0), torch.tensor(3.0, dtype=torch.float64)])
def test_the_loss_has_the_dtype_of_its_sums(dtype, of_loss, denominator):
    hidden, weight = torch.zeros(2, 5, 4, dtype=dtype), torch.zeros(8, 4, dtype=dtype)
    labels = torch.arange(10).view(2, 5) % 7
    loss = token_loss(hidden, weight, labels, vocab_size=7, label_smoothing=0.0, denominator=denominator)
    assert loss.dtype == of_loss
    assert loss.item() == pytest.approx(10 / 3 * torch.tensor(7.0).log().item())
