"""What a transformers model computes attention and experts with while it is decoded."""

from transformers import PreTrainedModel

from services.common.models.families import has_plain_scores

_ROW_BYTES = 16


def use_decoding_kernels(model: PreTrainedModel) -> None:
    """Choose them.

    Torch multiplies all experts at once where their rows are multiples of 16 bytes; others go one by one.
    """
    config = model.config.get_text_config().to_dict()
    model.set_attn_implementation("sdpa" if has_plain_scores(config) else "eager")
    experts = (value for value in model.parameters() if value.ndim == 3)
    if any(size * each.element_size() % _ROW_BYTES for each in experts for size in each.shape[1:]):
        model.set_experts_implementation("eager")
