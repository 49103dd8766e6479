"""Generated message classes of protos/hetsplit/v1/hetsplit.proto (`make proto`)."""
