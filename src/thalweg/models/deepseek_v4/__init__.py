"""DeepSeek-V4 over the operations: hyper-connections, SWA, CSA and HCA layers on paged caches, experts, MTP."""
