// The list of kernels. Joined after peer_core.cuh, peer_small.cuh and peer_bulk.cuh.
#define KERNEL(name, body) \
  extern "C" __global__ void BLOCK_LIMIT name(const __grid_constant__ Args a) { body(a); }
KERNEL(copy_packet, copy_small<Packet>)
KERNEL(copy_line, copy_small<Line>)
KERNEL(copy_bulk, copy_bulk_body)
#define SUMS(type) \
  KERNEL(sum_packet_##type, (sum_small<Packet, type##_t>)) \
  KERNEL(sum_line_##type, (sum_small<Line, type##_t>)) \
  KERNEL(sum_bulk_##type, sum_bulk_body<type##_t>)
SUMS(fp16)
SUMS(bf16)
SUMS(fp32)
