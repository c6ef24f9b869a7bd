"""A batch that has just been made."""

from headrace_router.batches.record import BatchRecord

NEW = BatchRecord(
    batch_id="batch_1",
    owner="o",
    key_id="",
    endpoint="/v1/completions",
    input_file_id="file-1",
    created_at=100,
    expires_at=1000,
    output_life_s=3600,
)
