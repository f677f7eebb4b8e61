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


def test_transforms_under_vmap_equal_loop():
    transforms = Transforms(crop=2, flip=True, rotation=20)
    x, keys = make_images(30).reshape(3, 10, 2, 6, 6), torch.tensor([3, 4, 5])
    expected = torch.stack([transform_images(transforms, image, key) for image, key in zip(x, keys, strict=True)])
    assert torch.equal(vmap(lambda image, key: transform_images(transforms, image, key))(x, keys), expected)
