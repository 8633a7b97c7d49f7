"""The ids that SGLang names the pages of prompts with images by, made outside its scheduler."""

from __future__ import annotations

import functools
from array import array
from types import SimpleNamespace
from typing import Any

from sglang.srt.managers.mm_utils import pad_mm_token_pairs, pad_mm_tokens
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalProcessorOutput

from pdserve.engine.sglang.tokenizer_manager import names_media, token_ids


def request_with_image(**more: Any) -> Any:
    """Two words, an image of three tokens, a word; as SGLang sends it to the scheduler."""
    item = MultimodalDataItem(modality=Modality.IMAGE, offsets=[(2, 4)], hash=5)
    item.set_hash(5)
    media = MultimodalProcessorOutput(mm_items=[item], im_token_id=9, **more)
    return SimpleNamespace(input_ids=array("q", [1, 2, 9, 9, 9, 3]), mm_inputs=media)


def test_pages_of_an_image_are_named_by_the_hash_of_its_pixels() -> None:
    asked = request_with_image()
    [item] = asked.mm_inputs.mm_items
    named = token_ids(asked, media_is_named=True)
    assert named == [1, 2, *item.padding_sequence(3), 3]
    assert max(named) > 2**32
    other = request_with_image()
    other.mm_inputs.mm_items[0].set_hash(6)
    assert token_ids(other, media_is_named=True) != named
    assert list(asked.input_ids) == [1, 2, 9, 9, 9, 3]


def test_ids_that_a_models_processor_has_replaced_are_taken_as_the_scheduler_takes_them() -> None:
    replaced = [1, 2, 70, 70, 70, 3]
    assert token_ids(request_with_image(padded_input_ids=replaced), media_is_named=False) == replaced
    shorter = request_with_image(padded_input_ids=replaced[:-1])
    assert token_ids(shorter, media_is_named=False) is None
    assert token_ids(shorter, media_is_named=True) == token_ids(request_with_image(), media_is_named=True)


def test_pages_of_an_image_without_a_hash_have_no_names() -> None:
    asked = request_with_image()
    asked.mm_inputs.mm_items = [MultimodalDataItem(modality=Modality.IMAGE, offsets=[(2, 4)])]
    assert token_ids(asked, media_is_named=True) is None
    assert token_ids(SimpleNamespace(input_ids=None, mm_inputs=None), media_is_named=True) is None


def logged(method: Any) -> Any:
    @functools.wraps(method)
    def call(*args: Any) -> Any:
        return method(*args)

    return call


def test_media_of_models_that_replace_ids_by_themselves_have_no_names() -> None:
    class Usual:
        def pad_input_ids(self, input_ids: Any, mm_inputs: Any) -> Any:
            return pad_mm_tokens(input_ids, mm_inputs)

    class Own:
        def pad_input_ids(self, input_ids: Any, mm_inputs: Any) -> Any:
            return pad_mm_tokens(input_ids + input_ids, mm_inputs) + input_ids.own

    def manager(architecture: str, processor: Any = None) -> Any:
        config = SimpleNamespace(hf_config=SimpleNamespace(architectures=[architecture]))
        return SimpleNamespace(mm_processor=processor, model_config=config)

    class OwnAlways:
        def pad_input_ids(self, input_ids: Any, mm_inputs: Any) -> Any:
            return self.vision_tower.pad_input_ids(input_ids, mm_inputs)  # type: ignore[attr-defined]

    class Wrapped:
        @logged
        def pad_input_ids(self, input_ids: Any, mm_inputs: Any) -> Any:
            if mm_inputs and mm_inputs.mm_items:
                return pad_mm_tokens(input_ids, mm_inputs)
            return input_ids

    class Pairs:
        def pad_input_ids(self, input_ids: Any, mm_inputs: Any) -> Any:
            return pad_mm_token_pairs(
                input_ids, mm_inputs, data_token_pairs=[(mm_inputs.im_start_id, mm_inputs.im_end_id)]
            )

    processor = SimpleNamespace(models=[Usual, Wrapped, Own, OwnAlways, Pairs])
    assert all(names_media(manager(name, processor)) for name in ("Usual", "Wrapped"))
    assert not any(names_media(manager(name, processor)) for name in ("Own", "OwnAlways", "Pairs", "Another"))
    assert not names_media(manager("Usual"))


def test_media_of_qwen_have_names() -> None:
    from sglang.srt.models.qwen2_vl import Qwen2VLForConditionalGeneration

    config = SimpleNamespace(hf_config=SimpleNamespace(architectures=["Qwen2VLForConditionalGeneration"]))
    processor = SimpleNamespace(models=[Qwen2VLForConditionalGeneration])
    assert names_media(SimpleNamespace(mm_processor=processor, model_config=config))
