"""The processes of one router: where each of them is asked, asking, and telling."""
