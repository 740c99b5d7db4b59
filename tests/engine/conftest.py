import pytest

from thalweg.models.deepseek_v4.model import DeepseekV4Model
from thalweg.models.open import TINY, open_model


@pytest.fixture(scope="session")
def tiny() -> DeepseekV4Model:
    model = open_model(TINY)
    assert isinstance(model, DeepseekV4Model)
    return model
