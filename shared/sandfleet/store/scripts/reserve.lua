-- Take a place on a node for a thread that has no sandbox; the new owner gets a larger epoch.
-- KEYS  1 prefix
-- ARGV  1 digest  2 thread id  3 user id or ''  4 backend  5 spec JSON  6 node  7 incarnation  8 data id
--       9 expires ms  10 burst 0|1  11 places a user may have, or 0  12 from the line 0|1  13 digest of the spec
--       14… candidate sandbox ids
-- Returns {status, route}, {'reserved', route, slot of the blank taken over or ''},
-- {'quota', '', sandbox to evict or ''}
--@use time route story reply line waiters sandbox blanks
local ms = now_ms()
local state, old_sid, old_route, old_node = thread_state(A[1], ms)
if state == 'live' then
  grant_waiters(A[1], old_route, ms, 'false')
  return { 'live', old_route }
elseif state then
  return { 'creating', old_route }
end

local thread = P .. 'thread:' .. A[1]
local last = call('HGET', thread, 'epoch')
if not last and tonumber(call('HGET', P .. 'fleet', 'recovering') or 0) > ms then return { 'recovering' } end

-- Whoever stood in line and gave up must not be given a place that nobody waits for.
if A[12] == '1' and not (call('ZSCORE', P .. 'parked', A[1]) and awaited(A[1], ms)) then
  leave_line(A[1])
  return { 'withdrawn' }
end
local node = A[6]
local n = call('HMGET', P .. 'node:' .. node, 'state', 'incarnation', 'replicas', 'burst_limit')
if n[1] ~= 'ready' or n[2] ~= A[7] or call('GET', P .. 'lease:' .. node) ~= A[7] then return { 'node_down' } end
local places, room = P .. 'places:' .. node, tonumber(n[3])
local taken = call('ZCOUNT', places, '(' .. ms, '+inf')
if old_node == node and tonumber(call('ZSCORE', places, old_sid) or 0) > ms then taken = taken - 1 end
local blank = choose_blank(node, A[13], taken >= room)
-- A free place belongs to the line, and so does a blank; one beyond the replicas does not.
local beyond = A[10] == '1' and taken >= room and not blank
if A[12] ~= '1' and not beyond and call('EXISTS', P .. 'parked') == 1 then return { 'queued' } end

-- How many places the user has, but for the one that is superseded, and the longest warm sandbox among them: none
-- while another one is being removed, which makes the room.
local function of_user(key)
  local held, evict, longest, leaving = call('ZCOUNT', key, '(' .. ms, '+inf'), '', math.huge, false
  for _, sid in ipairs(call('ZRANGEBYSCORE', key, '(' .. ms, '+inf', 'LIMIT', 0, 1000)) do
    local sb = call('HMGET', P .. 'sandbox:' .. sid, 'state', 'route')
    if not sb[1] or sb[1] == 'lost' then
      call('ZREM', key, sid)
      held = held - 1
    elseif sid == old_sid then
      held = held - 1
    else
      local _, home, inc = split(sb[2])
      if tonumber(call('ZSCORE', P .. 'stopping:' .. home, sid) or 0) > ms - 30000 then leaving = true end
      local since = sb[1] == 'live' and tonumber(call('ZSCORE', P .. 'warm:' .. home, sid) or nil)
      if since and since < longest and call('GET', P .. 'lease:' .. home) == inc then evict, longest = sid, since end
    end
  end
  return held, leaving and '' or evict
end

local most = tonumber(A[11])
if most > 0 and A[3] ~= '' and call('ZCOUNT', P .. 'user:' .. A[3], '(' .. ms, '+inf') >= most then
  local held, evict = of_user(P .. 'user:' .. A[3])
  if held >= most then return { 'quota', '', evict } end
end
if A[10] == '1' then room = room + tonumber(n[4] or 0) end
if taken >= room and not blank then return { 'full' } end
local sid
for i = 14, #A do
  local holder = call('GET', P .. 'id:' .. A[i])
  if not holder or holder == A[1] then
    sid = A[i]
    break
  end
end

local t = call('TIME')
local epoch = math.max(tonumber(last or 0) + 1, t[1] * 1000000 + t[2])
local epoch_text = string.format('%.0f', epoch)
local route = sid .. '|' .. node .. '|' .. A[7] .. '|' .. epoch_text
call('HSET', thread, 'sandbox_id', sid, 'epoch', epoch_text)
-- The data of a thread that has some moves with `created`: a creation that fails elsewhere leaves its home where it is.
call('HSETNX', thread, 'data_id', A[8])
call('PEXPIRE', thread, KEEP)
if old_sid then forget(old_sid, old_route, ms) end
if blank then drop_blank(node, blank) end
call('SET', P .. 'id:' .. sid, A[1], 'PX', KEEP)
call('HSET', P .. 'sandbox:' .. sid, 'owner', A[1], 'state', 'creating', 'route', route, 'thread', A[2],
  'user', A[3], 'backend', A[4], 'spec', A[5], 'data_id', A[8], 'created', ms, 'used', ms)
call('PEXPIRE', P .. 'sandbox:' .. sid, KEEP)
take_place(sid, node, A[3], ms + tonumber(A[9]))
call('ZADD', P .. 'sandboxes', 0, sid)
keep(P .. 'sandboxes', KEEP)
local turn = leave_line(A[1])
if turn and turn > tonumber(call('HGET', P .. 'line', 'reached') or 0) then
  call('HSET', P .. 'line', 'reached', turn)
end
story(sid, ms, 'reserved', where(route) .. (blank and text('blank', blank) or ''))
return { 'reserved', route, blank or '' }
