"""What an engine process tells its front, and what operators have it do, whichever its role is."""
