"""The router: tokenises, picks nodes, streams text. It holds no tensor and imports no torch."""
