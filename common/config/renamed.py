"""Old names of settings. They fail at the start with an error that has the new name."""

from collections.abc import Mapping

# Paths from a process's record to a setting or section, with dots.
RENAMED: Mapping[str, str] = {
    "budget_s": "request_timeout_s",
    "clients.longest_wait_s": "clients.max_queue_wait_s",
    "clients.salt_by_key": "clients.isolate_cache_by_key",
    "dead_s": "dead_after_s",
    "engine.cache.host_pages": "engine.cache.swap_pages",
    "engine.lora.adapters": "engine.lora.preload",
    "engine.lora.directory": "engine.lora.adapter_dir",
    "engine.lora.max_bytes": "engine.lora.max_cpu_lora_bytes",
    "engine.lora.max_loaded": "engine.lora.max_cpu_loras",
    "engine.lora.slots": "engine.lora.max_loras",
    "engine.profile_directory": "engine.profile_dir",
    "engine.scheduler.chunk_tokens": "engine.scheduler.chunked_prefill_tokens",
    "engine.scheduler.first_step_s": "engine.scheduler.first_step_timeout_s",
    "engine.scheduler.max_preempted": "engine.scheduler.max_preempted_requests",
    "engine.scheduler.max_running": "engine.scheduler.max_running_requests",
    "engine.scheduler.max_waiting": "engine.scheduler.max_queued_requests",
    "engine.scheduler.max_waiting_tokens": "engine.scheduler.max_queued_tokens",
    "engine.scheduler.overlap": "engine.scheduler.overlap_schedule",
    "engine.scheduler.preempt_by": "engine.scheduler.preemption_threshold",
    "engine.scheduler.stall_s": "engine.scheduler.step_timeout_s",
    "engine.scheduler.watchdog_s": "engine.scheduler.watchdog_timeout_s",
    "engine.speculation": "engine.speculative",
    "engine.speculation.drafter": "engine.speculative.method",
    "engine.speculation.max_drafts": "engine.speculative.num_speculative_tokens",
    "engine.speculation.min_match": "engine.speculative.prompt_lookup_min",
    "engine.tiers": "engine.offload",
    "engine.tiers.file_bytes": "engine.offload.disk_bytes",
    "engine.tiers.file_dir": "engine.offload.disk_dir",
    "engine.tiers.host_bytes": "engine.offload.cpu_bytes",
    "engine.weights_directory": "engine.weights_dir",
    "front": "server",
    "front.drain_s": "server.drain_timeout_s",
    "images.fetch": "images.allow_urls",
    "images.fetch_s": "images.fetch_timeout_s",
    "images.max_tokens": "images.max_tokens_per_image",
    "keep_answers_s": "idempotency_ttl_s",
    "local_prefill_tokens": "local_prefill_max_tokens",
    "max_granted_pages": "max_inflight_pages",
    "max_requests": "max_concurrent_requests",
    "nodes_tls": "node_tls",
    "pair_again_s": "reconnect_wait_s",
    "pooling": "pooling_type",
    "queue_share": "max_queue_fraction",
    "retries": "handoff_retries",
    "sharing": "prefix_sharing",
    "sharing.fetch_s": "prefix_sharing.fetch_timeout_s",
    "sharing.margin": "prefix_sharing.max_cost_ratio",
    "silence_s": "engine_heartbeat_timeout_s",
    "silent_s": "suspect_after_s",
    "trace_ratio": "trace_sample_ratio",
    "transfer.check_every": "transfer.checksum_interval",
    "transfer.data_host": "transfer.listen_host",
    "transfer.data_port": "transfer.listen_port",
    "transfer.min_gib_per_s": "transfer.min_link_gib_per_s",
    "transfer.missed_beats": "transfer.max_missed_heartbeats",
    "transfer.path": "transfer.backend",
    "transfer.progress_s": "transfer.chunk_timeout_s",
    "transfer.read_s": "transfer.read_timeout_s",
    "transfer.released_s": "transfer.release_timeout_s",
    "unread_s": "slow_client_timeout_s",
}
# Flags that are not paths: short names of settings, and options of commands.
RENAMED_FLAGS: Mapping[str, str] = {
    "exit_on_death": "exit_on_failure",
    "salt_by_key": "isolate_cache_by_key",
}

# Old names of settings below the new name of their section.
_IN_NEW_SECTIONS = {
    f"{section}.{old.rpartition('.')[2]}": new
    for old, new in RENAMED.items()
    if (section := new.rpartition(".")[0])
}


def renamed(path: str) -> str | None:
    """Return the new path of a renamed setting, or None if the path was not renamed."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        above = ".".join(parts[:length])
        if (new := RENAMED.get(above) or _IN_NEW_SECTIONS.get(above)) is not None:
            return ".".join([new, *parts[length:]])
    return None
