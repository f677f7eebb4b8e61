import pytest
import torch
from torch.func import vmap

from fedpipe.engine.clients.transforms import Normalization, transform_images
from fedpipe.settings.transforms import Transforms

KEY = torch.tensor(7)


def make_images(count=64, side=6, channels=2):
    return torch.arange(1, 1 + count * channels * side * side).reshape(count, channels, side, side).double()


def normalize(x, settings):
    return Normalization(settings, x.dtype, x.device)(x.clone())


def test_default_transforms_keep_images_unchanged():
    x = make_images()
    assert transform_images(Transforms(), x, KEY) is x
    assert torch.equal(normalize(x, Transforms()), x)


def test_normalization_centers_and_scales_each_channel():
    x = torch.tensor([[[[0.5]], [[1.0]]]])
    assert normalize(x, Transforms(mean=(0.5, 0.25), std=(0.5, 0.25))).flatten().tolist() == [0, 3]
    assert normalize(x, Transforms(mean=(0.5,), std=(0.25,))).flatten().tolist() == [0, 2]


def test_crop_is_window_of_padded_image():
    x = make_images()
    transformed = transform_images(Transforms(crop=2), x, KEY)
    padded = torch.nn.functional.pad(x, (2, 2, 2, 2))
    offsets = set()
    for image, padded_image in zip(transformed, padded, strict=True):
        matches = [
            (down, right)
            for down in range(5)
            for right in range(5)
            if torch.equal(image, padded_image[:, down : down + 6, right : right + 6])
        ]
        assert len(matches) == 1
        offsets.update(matches)
    assert {down for down, _ in offsets} == {right for _, right in offsets} == set(range(5))


NORMALIZED = {"mean": (0.5, 0.25), "std": (0.5, 2.0)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("augmentation", [{"crop": 2}, {"rotation": 90}, {"crop": 2, "flip": True, "rotation": 45}])
def test_black_padding_has_bits_of_augmentation_before_normalization(augmentation, dtype):
    x = torch.rand(64, 2, 6, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    settings = Transforms(**NORMALIZED, **augmentation)
    before = normalize(transform_images(Transforms(**augmentation), x, KEY), settings)
    transformed = transform_images(settings, normalize(x, settings), KEY)
    assert torch.equal(transformed, before)
    mean_color = transform_images(Transforms(**NORMALIZED, **augmentation, fill="mean"), normalize(x, settings), KEY)
    is_padding = transform_images(Transforms(**augmentation), torch.ones_like(x), KEY) == 0
    assert 0 < int(is_padding.sum()) < is_padding.numel()
    assert torch.equal(mean_color[~is_padding], before[~is_padding])
    assert not mean_color[is_padding].any()


def test_crop_equals_that_of_torchvision():
    """Its pipeline crops a padded image before it normalizes."""
    from torchvision.transforms import v2

    x = torch.rand(32, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    mean, std = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.201)
    settings = Transforms(mean=mean, std=std, crop=3)
    transformed = transform_images(settings, normalize(x, settings), KEY)
    padded = v2.Normalize(mean, std)(v2.Pad(3)(x))
    for image, padded_image in zip(transformed, padded, strict=True):
        windows = (padded_image[:, down : down + 8, right : right + 8] for down in range(7) for right in range(7))
        assert any(torch.allclose(image, window, rtol=0, atol=1e-6) for window in windows)


def test_flip_mirrors_about_half_of_images():
    x = make_images(400)
    transformed = transform_images(Transforms(flip=True), x, KEY)
    mirrored = (transformed == x.flip(-1)).flatten(1).all(1)
    assert bool((mirrored | (transformed == x).flatten(1).all(1)).all())
    assert 160 < int(mirrored.sum()) < 240


def test_rotation_is_bounded_by_angle_around_center():
    x = torch.zeros(200, 1, 21, 21, dtype=torch.float64)
    x[:, :, 10, 20] = 1  # ten pixels to the right of the center
    transformed = transform_images(Transforms(rotation=30), x, KEY)
    heights = [10 - int(place) for image in transformed for place in image[0].nonzero()[:, 0]]
    assert max(heights) == 5  # 10 sin 30°
    assert min(heights) == -5
    center = make_images(50, side=5)
    assert torch.equal(transform_images(Transforms(rotation=45), center, KEY)[:, :, 2, 2], center[:, :, 2, 2])


@pytest.mark.parametrize("settings", [{"crop": 1}, {"flip": True}, {"rotation": 90}])
def test_transforms_depend_on_key_and_position_in_batch(settings):
    x, transforms = make_images(), Transforms(**settings)
    transformed = transform_images(transforms, x, KEY)
    assert torch.equal(transform_images(transforms, x, KEY), transformed)
    assert torch.equal(transform_images(transforms, x[:10], KEY), transformed[:10])  # independent of the batch size
    assert not torch.equal(transform_images(transforms, x, KEY + 1), transformed)


@pytest.mark.parametrize("normalization", [{}, {"mean": (0.5,), "std": (0.5,)}, {"mean": (0.1, 0.2)}])
def test_transforms_under_vmap_equal_loop(normalization):
    transforms = Transforms(crop=2, flip=True, rotation=20, **normalization)
    x, keys = make_images(30).reshape(3, 10, 2, 6, 6), torch.tensor([3, 4, 5])
    transformed = vmap(lambda image, key: transform_images(transforms, image, key))(x, keys)
    expected = torch.stack([transform_images(transforms, image, key) for image, key in zip(x, keys, strict=True)])
    assert torch.equal(transformed, expected)
