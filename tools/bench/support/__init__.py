"""What benches share: systems, loads, models, peers, and the record they leave."""
