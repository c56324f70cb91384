"""A recorder of a model's logits, as a runner requested them."""


class Recorder:
    """A model that keeps the logits it gave."""

    def __init__(self, model):
        self.spec, self.device, self.dtype = model.spec, model.device, model.dtype
        self.seen = []
        self._model = model

    def forward(self, batch, pool, future_tokens, adapted=None, late=None):
        return self._model.forward(batch, pool, future_tokens, adapted, late)

    def logits(self, hidden):
        logits = self._model.logits(hidden)
        self.seen.append(logits.clone())
        return logits
