//! Admin commands and Fabrics commands.

use super::*;

impl Target {
    pub(super) fn fabrics(&mut self, qp: Qp, sqe: &Sqe, data: &[u8]) -> (Status, u64) {
        let cntlid = self.links[&qp].cntlid;
        match sqe.fabrics_type() {
            FabricsType::CONNECT => self.connect_queue(qp, sqe, data),
            FabricsType::PROPERTY_GET => {
                let Some(controller) = self.controllers.get(&cntlid) else {
                    return (Status::INTERNAL_ERROR, 0);
                };
                let cap = Cap(0).with_mqes_z(127).with_to_500ms(4).with_css(Cap::CSS_NVM);
                (
                    Status::SUCCESS,
                    match PropertyGet::parse(sqe).property {
                        Property::CAP => cap.0,
                        Property::VS => Vs::V1_4.0.into(),
                        _ => controller.csts.0.into(),
                    },
                )
            }
            FabricsType::PROPERTY_SET => {
                let cc = Cc(PropertySet::parse(sqe).value as u32);
                if let Some(controller) = self.controllers.get_mut(&cntlid) {
                    controller.csts = match cc.shn() {
                        Shutdown::Normal => controller.csts.with_shst(ShutdownStatus::Complete),
                        _ => controller.csts.with_rdy(cc.en()),
                    };
                }
                (Status::SUCCESS, 0)
            }
            other => panic!("{other:?}"),
        }
    }

    fn connect_queue(&mut self, qp: Qp, sqe: &Sqe, data: &[u8]) -> (Status, u64) {
        let memory = self.exposed.get(sqe).map(|memory| memory.to_vec());
        let bytes: [u8; 1024] = memory.unwrap_or(data.to_vec()).try_into().expect("Connect data");
        let (connect, data) = (Connect::parse(sqe), ConnectData::parse(&bytes));
        let port = self.links[&qp].port;
        let cntlid = if connect.qid == 0 { self.next_cntlid } else { data.cntlid };
        if connect.qid == 0 {
            self.next_cntlid += 1;
            let (qps, event_requests) = (Vec::new(), VecDeque::new());
            let (heard, csts, events) = (self.now, Csts(0), Vec::new());
            let controller = Controller { port, qps, heard, csts, event_requests, events };
            self.controllers.insert(cntlid, controller);
        }
        let Some(controller) = self.controllers.get_mut(&cntlid) else {
            return (Status::CONNECT_INVALID_PARAMETERS, 0);
        };
        controller.qps.push(qp);
        self.links.get_mut(&qp).expect("connected").cntlid = cntlid;
        (Status::SUCCESS, ConnectResult(0).with_cntlid(cntlid).0.into())
    }

    pub(super) fn admin(&mut self, qp: Qp, cntlid: u16, sqe: &Sqe) {
        let Some(controller) = self.controllers.get_mut(&cntlid) else { return };
        let port = controller.port;
        let (status, result) = match sqe.admin_opcode() {
            AdminOpcode::ASYNC_EVENT_REQUEST => {
                controller.event_requests.push_back(sqe.cid);
                return self.report();
            }
            AdminOpcode::KEEP_ALIVE => (Status::SUCCESS, 0),
            AdminOpcode::GET_FEATURES => (Status::SUCCESS, KATO_MS.into()),
            AdminOpcode::SET_FEATURES => {
                let queues = NumberOfQueues(0).with_submission_z(1).with_completion_z(1);
                let is_queues = SetFeatures::parse(sqe).fid == FeatureId::NUMBER_OF_QUEUES;
                (Status::SUCCESS, if is_queues { queues.0.into() } else { 0 })
            }
            AdminOpcode::IDENTIFY
                if Identify::parse(sqe).cns == Cns::NAMESPACE_DESCRIPTORS
                    && self.unread_identifiers > 0 =>
            {
                self.unread_identifiers -= 1;
                (Status::INTERNAL_ERROR, 0)
            }
            AdminOpcode::IDENTIFY => {
                let page = self.identify(cntlid, &Identify::parse(sqe));
                (self.reply_with(sqe, &page), 0)
            }
            AdminOpcode::GET_LOG_PAGE => {
                let GetLogPage { lid: log, lsp, .. } = GetLogPage::parse(sqe);
                controller.events.retain(|(event, _)| event.log() != log);
                let page = match log {
                    LogId::ANA => self.ana_log(port, lsp & 1 == 1),
                    _ => vec![0; 4096],
                };
                (self.reply_with(sqe, &page), 0)
            }
            AdminOpcode::GET_LBA_STATUS => {
                let list = self.lba_status(&GetLbaStatus::parse(sqe));
                (self.reply_with(sqe, &list), 0)
            }
            other => panic!("{other:?}"),
        };
        self.answer(qp, sqe.cid, status, result);
    }

    /// Blocks that are not zeros are allocated.
    fn lba_status(&self, get: &GetLbaStatus) -> Vec<u8> {
        let end = (get.slba + u64::from(get.rl)).min(self.size_blocks);
        let allocated: Vec<u64> =
            (get.slba..end).filter(|block| self.blocks[*block as usize] != 0).collect();
        let (nlsd, cmpc) = (allocated.len() as u32, CompletionCondition::COMPLETE);
        let mut list = LbaStatusHeader { nlsd, cmpc }.emit().to_vec();
        for dslba in allocated {
            let status = LbaStatusDescriptor::ALLOCATED;
            list.extend(LbaStatusDescriptor { dslba, nlb_z: 0, status }.emit());
        }
        list
    }

    fn reply_with(&mut self, sqe: &Sqe, page: &[u8]) -> Status {
        let Some(memory) = self.exposed.get(sqe) else { return Status::INTERNAL_ERROR };
        let len = memory.len().min(page.len());
        memory[..len].copy_from_slice(&page[..len]);
        Status::SUCCESS
    }

    fn ana_log(&self, port: usize, groups_only: bool) -> Vec<u8> {
        let (grpid, state) = (self.ana_group, self.ports[port].ana);
        let nnsids = if groups_only { 0 } else { 1 };
        let mut log = AnaHeader { chgcnt: 1, ngrps: 1 }.emit().to_vec();
        log.extend(AnaGroup { grpid, nnsids, state, ..AnaGroup::default() }.emit());
        log.extend([1, 0, 0, 0].iter().filter(|_| !groups_only));
        log
    }

    fn identify(&self, cntlid: u16, command: &Identify) -> Vec<u8> {
        let mut page = [0; 4096];
        match command.cns {
            Cns::CONTROLLER => controller(cntlid).emit(&mut page),
            Cns::NAMESPACE if !self.is_removed => {
                let mut lbaf = [LbaFormat::default(); 64];
                lbaf[0].lbads = 9;
                let (nsze, ncap, anagrpid) = (self.size_blocks, self.size_blocks, self.ana_group);
                let nguid = [7; 16];
                IdentifyNamespace {
                    nsze,
                    ncap,
                    anagrpid,
                    nsattr: self.is_write_protected.into(),
                    nguid,
                    lbaf,
                    ..IdentifyNamespace::default()
                }
                .emit(&mut page);
            }
            Cns::NAMESPACE_DESCRIPTORS if !self.is_removed => {
                NamespaceIds { uuid: Some(self.uuid), ..NamespaceIds::default() }.emit(&mut page);
            }
            Cns::CSI_CONTROLLER => {
                let (wzsl, dmrsl) = (self.wzsl, self.dmrsl);
                IdentifyControllerNvm { wzsl, dmrsl, ..IdentifyControllerNvm::default() }
                    .emit(&mut page);
            }
            _ => {}
        }
        page.to_vec()
    }
}

fn controller(cntlid: u16) -> IdentifyController {
    IdentifyController {
        cntlid,
        mdts: 5,
        kas_100ms: 1,
        maxcmd: 64,
        nn: 1,
        cmic: Cmic(0).with_multi_port(true).with_multi_controller(true).with_ana(true),
        anatt_s: 3,
        anagrpmax: 2,
        nanagrpid: 2,
        crdt1_100ms: 1,
        crdt2_100ms: 4,
        oncs: Oncs(0).with_dataset_management(true).with_write_zeroes(true),
        oaes: AsyncEventConfig(0).with_namespace_attribute(true).with_ana_change(true),
        cntrltype: ControllerType::IO,
        sgls: Sgls(0).with_support(1).with_keyed(true).with_offset(true),
        ioccsz_16: (64 + 4096) / 16,
        iorcsz_16: 1,
        ..IdentifyController::default()
    }
}
