"""What tells people: one small module per channel; each only sends, the outbox remembers and retries."""
