/* One rank of an MPI implementation in a comparison. README.md describes the questions and the answers. */

#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

static int rank, ranks;

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

/* Grows a buffer. Its old content is not kept. */
static float *room(float **buffer, size_t *len, size_t wanted) {
    if (*len < wanted) {
        free(*buffer);
        if (posix_memalign((void **)buffer, 4096, wanted ? wanted : 1) != 0) {
            fprintf(stderr, "no memory\n");
            exit(1);
        }
        *len = wanted;
    }
    return *buffer;
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);

    if (argc < 3) {
        MPI_Barrier(MPI_COMM_WORLD);
        MPI_Finalize();
        return 0;
    }

    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%s", argv[2]);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    if (connect(fd, (struct sockaddr *)&address, sizeof address) != 0) {
        perror(argv[2]);
        return 1;
    }
    FILE *in = fdopen(fd, "r"), *out = fdopen(dup(fd), "w");
    fprintf(out, "%s %d\n", argv[1], rank);
    fflush(out);

    float *send = NULL, *recv = NULL;
    size_t send_len = 0, recv_len = 0;
    char op[32];
    size_t bytes;
    int warmup, iters, calls;
    while (fscanf(in, "%31s %zu %d %d %d", op, &bytes, &warmup, &iters, &calls) == 5) {
        int count = (int)(bytes / sizeof(float)), block = count / ranks;
        room(&send, &send_len, bytes);
        room(&recv, &recv_len, bytes);
        memset(send, 0, bytes);
        memset(recv, 0, bytes);
        for (int i = 0; i < warmup + iters; i++) {
            MPI_Barrier(MPI_COMM_WORLD);
            int64_t began = now();
            for (int call = 0; call < calls; call++) {
                if (strcmp(op, "all_reduce") == 0)
                    MPI_Allreduce(MPI_IN_PLACE, recv, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
                else if (strcmp(op, "barrier") == 0)
                    MPI_Barrier(MPI_COMM_WORLD);
                else if (strcmp(op, "broadcast") == 0)
                    MPI_Bcast(send, count, MPI_FLOAT, 0, MPI_COMM_WORLD);
                else if (strcmp(op, "all_gather") == 0)
                    MPI_Allgather(send, block, MPI_FLOAT, recv, block, MPI_FLOAT, MPI_COMM_WORLD);
                else if (strcmp(op, "reduce_scatter") == 0)
                    MPI_Reduce_scatter_block(send, recv, block, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
                else if (strcmp(op, "all_to_all") == 0)
                    MPI_Alltoall(send, block, MPI_FLOAT, recv, block, MPI_FLOAT, MPI_COMM_WORLD);
                else {
                    fprintf(stderr, "%s is unknown\n", op);
                    return 1;
                }
            }
            if (i >= warmup)
                fprintf(out, "%lld ", (long long)((now() - began) / calls));
        }
        fprintf(out, "\n");
        fflush(out);
    }
    MPI_Finalize();
    return 0;
}
