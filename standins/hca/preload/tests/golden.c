// Posts the requests that it reads, with libmlx5's ibv_post_send, and prints the block of each. It fills the
// slot of each request with zeros first.
#include <endian.h>
#include <infiniband/mlx5dv.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define OK(x) do { if (!(x)) { perror(#x); exit(1); } } while (0)

static struct ibv_qp *make(struct ibv_context *c, struct mlx5dv_qp *facts) {
    struct ibv_pd *pd = ibv_alloc_pd(c);
    OK(pd);
    struct ibv_cq *cq = ibv_create_cq(c, 1024, 0, 0, 0);
    OK(cq);
    struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
        .cap = {.max_send_wr = 256, .max_send_sge = 1, .max_inline_data = 12}};
    struct ibv_qp *q = ibv_create_qp(pd, &init);
    OK(q);
    struct ibv_qp_attr a = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = 15};
    OK(!ibv_modify_qp(q, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
    a.qp_state = IBV_QPS_RTR;
    a.path_mtu = IBV_MTU_4096;
    a.dest_qp_num = q->qp_num;
    a.max_dest_rd_atomic = 16;
    a.ah_attr.dlid = 1;
    a.ah_attr.port_num = 1;
    OK(!ibv_modify_qp(q, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN
                                 | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
    a.qp_state = IBV_QPS_RTS;
    a.max_rd_atomic = 16;
    OK(!ibv_modify_qp(q, &a, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN
                                 | IBV_QP_MAX_QP_RD_ATOMIC));
    struct mlx5dv_obj obj = {.qp = {q, facts}};
    OK(!mlx5dv_init_obj(&obj, MLX5DV_OBJ_QP));
    return q;
}

int main(void) {
    int count;
    struct ibv_device **list = ibv_get_device_list(&count);
    OK(list && count == 1);
    struct ibv_context *c = ibv_open_device(list[0]);
    OK(c);
    struct mlx5dv_qp facts = {0};
    struct ibv_qp *q = make(c, &facts);
    printf("%x\n", q->qp_num);
    // Operation, flags, remote address and key, local address, key and bytes, immediate data, addend, inline data.
    unsigned op, flags, rkey, lkey, bytes, imm;
    unsigned long long remote, local, add, data[2];
    for (unsigned i = 0; scanf("%u %u %llx %x %llx %x %u %x %llx %llx %llx", &op, &flags, &remote, &rkey, &local, &lkey,
             &bytes, &imm, &add, &data[0], &data[1]) == 11; i++) {
        uint8_t *slot = (uint8_t *)facts.sq.buf + 64 * i;
        memset(slot, 0, 64);
        struct ibv_sge sge = {flags & IBV_SEND_INLINE ? (uintptr_t)data : local, bytes, lkey};
        struct ibv_send_wr *bad, wr = {.opcode = op, .send_flags = flags, .sg_list = &sge, .num_sge = 1,
            .imm_data = htobe32(imm)};
        if (op == IBV_WR_ATOMIC_FETCH_AND_ADD) {
            wr.wr.atomic.remote_addr = remote;
            wr.wr.atomic.rkey = rkey;
            wr.wr.atomic.compare_add = add;
        } else {
            wr.wr.rdma.remote_addr = remote;
            wr.wr.rdma.rkey = rkey;
        }
        OK(!ibv_post_send(q, &wr, &bad));
        for (int at = 0; at < 64; at++)
            printf("%02x", slot[at]);
        printf(" %x\n", be32toh(facts.dbrec[MLX5_SND_DBR]));
    }
    return 0;
}
