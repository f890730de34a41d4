//! What the awk programs of the scripts read, and what they say to it.

/// One awk program of a script: those of the same script follow each other as they do there.
pub(crate) struct Sample {
    pub(crate) script: &'static str,
    /// Values of its options `-v`, as `name=value`.
    pub(crate) variables: &'static [&'static str],
    pub(crate) input: &'static str,
    pub(crate) output: &'static str,
    pub(crate) status: i32,
}

const fn sample(script: &'static str, input: &'static str, output: &'static str) -> Sample {
    Sample { script, variables: &[], input, output, status: 0 }
}

impl Sample {
    const fn with(self, variables: &'static [&'static str]) -> Sample {
        Sample { variables, ..self }
    }

    const fn fails(self) -> Sample {
        Sample { status: 1, ..self }
    }
}

const PROCESS_STATUS: &str = "Name:\tnvmfd\nUid:\t65534\t65534\t65534\t65534\nCapInh:\t0000000000000000\nCapPrm:\t0000000000000000\nThreads:\t10\nVmRSS:\t   87212 kB\nRssAnon:\t   61440 kB\nRssFile:\t   24748 kB\nRssShmem:\t    1024 kB\n";
const PROCESS_STAT: &str =
    "4711 (nvmfd) S 1 4711 4711 0 -1 4194560 900 0 0 0 123 45 0 0 20 0 10 0 100 1 2\n";
const CPU_TIMES: &str =
    "cpu  4705 150 1120 16250856 520 30 2500 7 0 0\ncpu0 1 2 3 4 5 6 7 8 9 10\n";
const SEQUENCE: &str = "1 0 connect\n1 0 async-event\n2 0 connect\n2 0 property-set 14\n3 1 connect\n3 1 read\n2 0 property-get 1c\n";

pub(crate) const SAMPLES: &[Sample] = &[
    sample(
        ".ci/run",
        "     Summary [ 300.1s] 1489 tests run: 1487 passed (3 slow), 2 failed, 12 skipped\ntest result: ok. 7 passed; 0 failed; 0 ignored\nok   connect\nFAIL discover\n23 passed, 1 failed\n",
        "1495 3\n",
    ),
    sample(
        "configs/sbom",
        "name = \"libc\"\nversion = \"0.2.1\"\nsource = \"registry\"\nchecksum = \"abc\"\n\n[[package]]\nname = \"own\"\nversion = \"0.1.0\"\n",
        "\"libc\" \"0.2.1\" \"abc\"\n",
    ),
    sample(
        "tests/bench/cost",
        "1,000 /a/rdma/src/soft/qp/mod.rs:nvmfd_core::queue::turn\n500 /rustc/1/ptr/mod.rs:rdma::soft::send\n2,500 /a/target/core/src/queue.rs:nvmfd_core::queue::turn\n300 /a/crc32fast-1.5/src/lib.rs:rdma::soft::send\n60 /rustc/1/ptr/mod.rs:crc32fast::update\n90 ./string/memmove.S:__memcpy_avx\n120 /a/rdma/src/soft/sim/network.rs:rdma::soft::send\n30 /rustc/1/ptr/mod.rs:rdma::soft::sim::enter\n150 /a/tests/src/bin/b.rs:b::turn\n",
        "    1583.3 instructions a command: 833.3 nvmfd, 500.0 rdma, 120.0 CRC, 30.0 copies, 50.0 simulated network\n    1166.7 nvmfd_core::queue::turn\n     306.7 rdma::soft::send\n      50.0 b::turn\n      30.0 __memcpy_avx\n      20.0 crc32fast::update\n      10.0 rdma::soft::sim::enter\n",
    ).with(&["few=2", "many=5"]),
    sample(
        "tests/bench/hostile",
        PROCESS_STATUS,
        "87212\n",
    ),
    sample(
        "tests/bench/hostile",
        "packets from anybody\t900\t1000\t1000\t12\npackets from anybody\t800\t1000\t1000\t2300\npackets from anybody\t950\t1000\t1000\t5\nconnections\t10\t100\t100\t9000\n",
        "\nattacker                        reads/s    of calm   beside decoy    longest connect\npackets from anybody                900       90 %           90 %            2300 ms\nconnections                          10       10 %           10 %            9000 ms\n\npackets from anybody: the bystander keeps 90 %, not 95 %\npackets from anybody: a connect took 2300 ms\nconnections: the bystander keeps 10 %, not 95 %\nconnections: a connect took 9000 ms\n",
    ).with(&["share=95"]).fails(),
    sample(
        "tests/bench/lib.sh",
        "4k read, depth 1\t12.345\tus\t10\n4k read, depth 1\t14\tus\t10\n128k write\t2000.4\tMB/s\t2500\n",
        "4k read, depth 1                          12.35 us           10.00  1.23 (1.23, 1.40)\n128k write                                 2000 MB/s          2500  0.80 (0.80, 0.80)\n",
    ),
    sample(
        "tests/bench/loss",
        "loss\t--loss 1\t800\t1000\nloss\t--loss 1\t500\t1000\nloss\t--loss 1\t550\t1000\nloss\t--loss 5\t300\t1000\n",
        "loss                     --loss 1                                  550   55 % (50, 80)\nloss                     --loss 5                                  300   30 % (30, 30)\n\nloss, --loss 1: 55 %, not 60 %\n",
    ).fails(),
    sample(
        "tests/bench/qos",
        "",
        "",
    ).with(&["g=5050", "w=5000", "p=3"]),
    sample(
        "tests/bench/qos",
        "",
        "50 MiB/s, one host                                                 5051         5000   +1.01 %  within 3 %\n",
    ).with(&["what=50 MiB/s, one host", "g=5050.7", "w=5000", "v=within 3 %"]),
    sample(
        "tests/bench/scale",
        PROCESS_STATUS,
        "61440\n",
    ),
    sample(
        "tests/bench/scale",
        "",
        "48640",
    ).with(&["p=12.5", "r=61440"]),
    sample(
        "tests/demo/attach",
        "         0    67108864    0  data\n  67108864   201326592    3  hole,zero\n",
        "67108864:data 201326592:hole,zero",
    ),
    sample(
        "tests/demo/demo",
        "  read: IOPS=38.2k, BW=149MiB/s (156MB/s)(298MiB/2000msec)\n    slat (nsec): min=100, max=900, avg=200.00, stdev=3.00\n     lat (usec): min=101, max=9071, avg=838.12, stdev=51.85\n    lat percentiles (usec):\n     |  1.00th=[  400],  5.00th=[  500], 99.00th=[ 5591], 99.50th=[ 6000],\n",
        "    randread 4k, depth 32             38.2k      156MB/s    838.12 usec      5591 usec\n",
    ).with(&["name=randread 4k, depth 32"]),
    sample(
        "tests/demo/demo",
        "192.0.2.2 2001:db8::1 \n",
        "192.0.2.2\n",
    ),
    sample(
        "tests/demo/record",
        "2. It\n  $ nvmfctl status\n    ours\n  $ nvme list\n    its version\n3. More\n    ours\n",
        "2. It\n  $ nvmfctl status\n    ours\n  $ nvme list\n3. More\n    ours\n",
    ),
    sample(
        "tests/demo/record",
        "3. A refused host\n  $ nvmf list <x> & y\n   answer\n\n",
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"960\" height=\"79\" font-family=\"monospace\" font-size=\"12.5\" role=\"img\">\n  <title>A refused host and its cause; a daemon that is killed while a host writes</title>\n  <rect width=\"960\" height=\"79\" rx=\"6\" fill=\"#1b1f24\"/>\n  <text x=\"14\" y=\"27\" fill=\"#79c0ff\" xml:space=\"preserve\">3. A refused host</text>\n  <text x=\"14\" y=\"44\" fill=\"#7ee787\" xml:space=\"preserve\">  $ nvmf list &lt;x&gt; &amp; y</text>\n  <text x=\"14\" y=\"61\" fill=\"#e6edf3\" xml:space=\"preserve\">   answer</text>\n</svg>\n",
    ),
    sample(
        "tests/vm/demo",
        PROCESS_STATUS,
        "85\n",
    ),
    sample(
        "tests/vm/demo",
        PROCESS_STAT,
        "1.68\n",
    ),
    sample(
        "tests/vm/demo",
        PROCESS_STATUS,
        "10\n",
    ),
    sample(
        "tests/vm/guest/flow-bench",
        CPU_TIMES,
        "8505\n",
    ),
    sample(
        "tests/vm/guest/flow-bench",
        "",
        "1.20 1.18 0.87 0.98 - ",
    ).with(&["a=1200 4.7 26.1 88 -", "b=1000 4.0 30 90 -"]),
    sample(
        "tests/vm/guest/flow-capture",
        "a;;0x00000010;;\nb;8388608;0x0010;4;\n",
        "1\n",
    ).with(&["f=2", "re=8388608"]),
    sample(
        "tests/vm/guest/flow-capture",
        "1 0 connect\n2 0 identify 01\n2 0 async-event\n2 0 property-get 1c\n",
        "identify 01\nproperty-get 1c\n",
    ).with(&["c=2"]),
    sample(
        "tests/vm/guest/flow-capture",
        SEQUENCE,
        "1.0\n2.0\n3.1\n",
    ),
    sample(
        "tests/vm/guest/flow-capture",
        SEQUENCE,
        "1\n",
    ),
    sample(
        "tests/vm/guest/flow-capture",
        SEQUENCE,
        "connect\nproperty-set 14\nproperty-get 1c\n",
    ),
    sample(
        "tests/vm/guest/flow-changes",
        "",
        "0.399\n",
    ).with(&["s=399"]),
    sample(
        "tests/vm/guest/flow-changes",
        "",
        "0.04\n",
    ).with(&["s=40"]),
    sample(
        "tests/vm/guest/flow-cycles",
        "qp 3\nqp 4\n",
        "qp=7\n",
    ),
    sample(
        "tests/vm/guest/flow-ground",
        "Max locked memory         8388608              unlimited            bytes     \n",
        "8388608 unlimited\n",
    ),
    sample(
        "tests/vm/guest/flow-idle",
        CPU_TIMES,
        "8505\n",
    ),
    sample(
        "tests/vm/guest/flow-kill",
        "",
        "2.499\n",
    ).with(&["s=1499"]),
    sample(
        "tests/vm/guest/flow-netem",
        "dropped 12\ndropped 30\n",
        "42\n",
    ),
    sample(
        "tests/vm/guest/link.sh",
        "192.168.77.1 lladdr 52:54:00:4c:ab:00 PERMANENT\n",
        "52:54:00:4c:ab:00\n",
    ),
    sample(
        "tests/vm/guest/link.sh",
        "qdisc netem 8001: root refcnt 2 limit 50000 loss 1%\n Sent 18934 bytes 210 pkt (dropped 3, overlimits 0 requeues 0)\nqdisc other 1:\n Sent 1 bytes 1 pkt (dropped 0, overlimits 0)\n",
        "received 210 frames, dropped 3,\n",
    ).with(&["d=in0"]),
    sample(
        "tests/vm/guest/sequence",
        "0x11\t0000000000000000000000007f000000010000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000\n0x11\t0000000000000000000000007f000000000000000000000000000000000000000000000000000000000000000000000000000000000000001400000000000000000000000000000000000000\n0x11\t00000000000000000000000006000000000000000000000000000000000000000000000000000000000000000000000000000000010000000000000000000000000000000000000000000000\n0x12\t0000000000000000000000007f000000010000000000000000000000000000000000000000000000000000000000000000000000000001000000000000000000000000000000000000000000\n0x12\t00000000000000000000000002000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000\n0x13\t00000000000000000000000002000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000\n",
        "1 0 connect\n1 0 property-set 14\n1 0 identify 01\n2 1 connect\n2 1 read\n",
    ),
    sample(
        "tests/vm/guest/target.sh",
        PROCESS_STATUS,
        "87212\n",
    ),
    sample(
        "tests/vm/guest/target.sh",
        PROCESS_STATUS,
        "62464\n",
    ),
    sample(
        "tests/vm/guest/target.sh",
        "4200000000 12 3\n5100000000 1 2\n",
        "9300000",
    ),
    sample(
        "tests/vm/guest/target.sh",
        "Threads:\t2\nvoluntary_ctxt_switches:\t40\nnonvoluntary_ctxt_switches:\t7\nThreads:\t2\nvoluntary_ctxt_switches:\t2\nnonvoluntary_ctxt_switches:\t1\n",
        "42\n",
    ),
    sample(
        "tests/vm/guest/target.sh",
        "128.5\n",
        "131584",
    ),
    sample(
        "tests/vm/guest/target.sh",
        PROCESS_STATUS,
        "user none\n",
    ),
];
