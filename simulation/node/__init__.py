"""A simulated node: its engine runs on the event loop of its frontend, with a simulated device."""
