"""A loaded model, as the runner uses it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from common.errors import EngineFault
from engine.batch.forward import ForwardBatch
from engine.kv_cache.kv import KVPool
from engine.models.blocks.experts import RoutedExperts
from engine.models.blocks.layer import AdaptedLinear, LateStates, Layer
from engine.models.drafting import DeviceDrafter
from engine.models.linear import Product
from engine.models.spec import LoadTarget, ModelSpec
from engine.models.vision.seeing import VisionTower


class Model(ABC):
    """The weights of a model and its forward. Stateless: KV is in the pool argument.

    Attributes:
        seeing: encodes images. None: the model has no image input, or another rank encodes images.
        drafter: drafter with layers on the device. None: there is no drafter.
        routed: experts of each token of the newest forward. None: they are not recorded.
        products: products that adapters may change. Empty if the model supports no adapters.
        elsewhere: name prefixes of modules in other pipeline stages.
        layers: native layers. Empty if a class of transformers computes the model.
    """

    def __init__(self, spec: ModelSpec, target: LoadTarget) -> None:
        self.spec = spec
        self.target = target
        self.device = target.device
        self.dtype = target.dtype
        self.seeing: VisionTower | None = None
        self.drafter: DeviceDrafter | None = None
        self.routed: RoutedExperts | None = None
        self.products: Sequence[Product] = ()
        self.elsewhere: tuple[str, ...] = ()
        self.layers: Sequence[Layer] = ()

    @abstractmethod
    def compute_in_one_way(self) -> None:
        """Compute a token in the same way in every step from now on, even if another way is
        faster."""

    @abstractmethod
    def forward(
        self,
        batch: ForwardBatch,
        pool: KVPool,
        future_tokens: Tensor,
        adapted: AdaptedLinear | None = None,
        late: LateStates | None = None,
    ) -> Tensor:
        """Compute a step, and write the KV and states of its tokens into their pages.

        Never waits for the device. Batches of equal shapes at equal addresses launch the same
        kernels on the same addresses, so that a forward can be captured as a graph.

        Args:
            future_tokens: int32 [num_slots], the last token sampled in every slot.
            adapted: None if no row has an adapter.
            late: for a step with drafts. Collects the state updates that follow verification.
        Returns:
            Hidden states of batch.sampled, [num_sampled, hidden], for `logits`. The first of two
                pipeline stages returns memory for them, and keeps the tensors for the last stage.
                The last stage sends the hidden states back.
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [n, vocabulary]. Only for a model that generates."""

    def labels(self, hidden: Tensor) -> Tensor:
        """Return class logits [n, num_labels] in the model's dtype. Only for a model with
        labels."""
        raise EngineFault("the model has no labels")
