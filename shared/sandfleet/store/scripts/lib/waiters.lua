-- Acquires that wait for a thread: hash op id -> "expiry|agent ttl|reply_to|agent", and under "@…" the last request
-- and until when the longest waits.
local MAX_WAITERS, FEW = 1000, 24

local function read_waiters(digest, ms, prune)
  local key = P .. 'waiting:' .. digest
  local all = call('HGETALL', key)
  local found, marks = {}, {}
  for i = 1, #all, 2 do
    if string.sub(all[i], 1, 1) == '@' then
      marks[all[i]] = all[i + 1]
    else
      local expiry, ttl, client, agent = split(all[i + 1])
      if tonumber(expiry) > ms then
        found[#found + 1] = { op = all[i], expiry = tonumber(expiry), ttl = tonumber(ttl), client = client,
          agent = agent }
      elseif prune then
        call('HDEL', key, all[i])
      end
    end
  end
  return found, marks
end

-- Every waiter whose client still listens becomes an agent of the sandbox and gets its route.
local function grant_waiters(digest, route, ms, new)
  local granted = 0
  local sid, node, inc, epoch = split(route)
  local payload = '{"ok":{"sandbox_id":"' .. sid .. '","node_id":' .. cjson.encode(node) .. ',"incarnation":'
    .. cjson.encode(inc) .. ',"epoch":' .. epoch .. ',"new":' .. new .. '}}'
  local agents = P .. 'agents:' .. sid
  for _, w in ipairs(read_waiters(digest, ms)) do
    if reply(w.client, w.op, payload) then
      call('ZADD', agents, ms + w.ttl, w.agent)
      keep(agents, math.max(w.ttl, 2 * DAY))
      granted = granted + 1
    end
  end
  call('DEL', P .. 'waiting:' .. digest)
  leave_line(digest)
  if granted > 0 then call('ZREM', P .. 'warm:' .. node, sid) end
  return granted
end

local function fail_waiters(digest, ms, payload)
  local waiters = read_waiters(digest, ms)
  for _, w in ipairs(waiters) do reply(w.client, w.op, payload) end
  call('DEL', P .. 'waiting:' .. digest)
  leave_line(digest)
  return #waiters
end

-- What they waited for is out of the way: ask the scheduler again in their name.
local function request_again(digest, ms)
  local waiters, marks = read_waiters(digest, ms)
  if #waiters == 0 or not marks['@queue'] then return end
  call('HSET', P .. 'waiting:' .. digest, '@req', ms)
  call('LPUSH', marks['@queue'], marks['@message'])
end
